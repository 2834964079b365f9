"""Lossless several-fold faster generation for Hugging Face models with Domino speculative decoding.

Importing it takes a moment and needs no torch: names are loaded when they are asked for, Transformers is patched when
it is imported (see `integration.patch`), and its auto classes learn of drafters then.
"""

import os
from typing import TYPE_CHECKING

from hf_domino._common.late import late
from hf_domino._common.version import __version__ as __version__
from hf_domino.integration.auto_classes import register_auto_classes
from hf_domino.integration.default_drafter import Attached, attached, detach, plain
from hf_domino.integration.patch import attach, install, is_installed, uninstall

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig
    from hf_domino.decoding.candidate_generator import DominoCandidateGenerator
    from hf_domino.decoding.static.workspace import release_workspaces
    from hf_domino.drafter.modeling import DominoDraftModel, recycling
    from hf_domino.drafter.phases import timed_phases
    from hf_domino.drafter.stats import DecodingStats
    from hf_domino.evaluation.check import CheckResult, WidthProbe, check_fit, probe_width
    from hf_domino.evaluation.explain import Round, explain_round
    from hf_domino.integration.grammar import AllowedByGrammar

__all__ = [
    "AllowedByGrammar",
    "Attached",
    "CheckResult",
    "DecodingStats",
    "DominoCandidateGenerator",
    "DominoConfig",
    "DominoDraftModel",
    "Round",
    "WidthProbe",
    "attach",
    "attached",
    "check_fit",
    "detach",
    "explain_round",
    "install",
    "is_installed",
    "plain",
    "probe_width",
    "recycling",
    "release_workspaces",
    "timed_phases",
    "uninstall",
]

# Public name -> module it is loaded from.
_LATER = {
    "CheckResult": "evaluation.check",
    "WidthProbe": "evaluation.check",
    "check_fit": "evaluation.check",
    "probe_width": "evaluation.check",
    "DominoConfig": "configuration",
    "DominoCandidateGenerator": "decoding.candidate_generator",
    "release_workspaces": "decoding.static.workspace",
    "DominoDraftModel": "drafter.modeling",
    "Round": "evaluation.explain",
    "explain_round": "evaluation.explain",
    "AllowedByGrammar": "integration.grammar",
    "DecodingStats": "drafter.stats",
    "timed_phases": "drafter.phases",
    "recycling": "drafter.modeling",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)

register_auto_classes()
if os.environ.get("HF_DOMINO_NO_PATCH") != "1":
    install()
