"""Domino speculative decoding for Hugging Face models: lossless generation that is several times faster.

Importing this package is quick and does not import torch. Public names are loaded when they are first used. As soon as
Transformers is imported, it is patched (see `integration.patch`) and its auto classes learn the drafters' model type.
"""

import os
from typing import TYPE_CHECKING

from hf_domino._common.late import late
from hf_domino._common.version import __version__ as __version__
from hf_domino.integration.auto_classes import register_auto_classes
from hf_domino.integration.default_drafter import Attached, attached, detach, plain
from hf_domino.integration.patch import attach, install, is_installed, uninstall

if TYPE_CHECKING:
    from hf_domino.decoding.candidate_generator import DominoCandidateGenerator
    from hf_domino.decoding.lookup_memory import LookupMemory
    from hf_domino.decoding.static.workspace import release_workspaces
    from hf_domino.evaluation.check import CheckResult, WidthProbe, check_fit, probe_width
    from hf_domino.evaluation.explain import Round, explain_round
    from hf_domino.integration.grammar import AllowedByGrammar
    from hf_domino.methods import DominoConfig, DominoDraftModel, recycling
    from hf_domino.stats.decoding_stats import DecodingStats
    from hf_domino.stats.phases import timed_phases
    from hf_domino.targets.packed import packed_linears

__all__ = [
    "AllowedByGrammar",
    "Attached",
    "CheckResult",
    "DecodingStats",
    "DominoCandidateGenerator",
    "DominoConfig",
    "DominoDraftModel",
    "LookupMemory",
    "Round",
    "WidthProbe",
    "attach",
    "attached",
    "check_fit",
    "detach",
    "explain_round",
    "install",
    "is_installed",
    "packed_linears",
    "plain",
    "probe_width",
    "recycling",
    "release_workspaces",
    "timed_phases",
    "uninstall",
]

# Public name -> the module that it is loaded from.
_LATER = {
    "CheckResult": "evaluation.check",
    "WidthProbe": "evaluation.check",
    "check_fit": "evaluation.check",
    "probe_width": "evaluation.check",
    "DominoConfig": "methods",
    "DominoCandidateGenerator": "decoding.candidate_generator",
    "LookupMemory": "decoding.lookup_memory",
    "release_workspaces": "decoding.static.workspace",
    "DominoDraftModel": "methods",
    "Round": "evaluation.explain",
    "explain_round": "evaluation.explain",
    "AllowedByGrammar": "integration.grammar",
    "DecodingStats": "stats.decoding_stats",
    "timed_phases": "stats.phases",
    "recycling": "methods",
    "packed_linears": "targets.packed",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)

register_auto_classes()
if os.environ.get("HF_DOMINO_NO_PATCH") != "1":
    install()
