"""Lossless several-fold faster generation for Hugging Face models with Domino speculative decoding."""

import os

from hf_domino.check import CheckResult, WidthProbe, check_fit, probe_width
from hf_domino.configuration import DominoConfig
from hf_domino.decoding.static.workspace import release_workspaces
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drift.shadow import ShadowReport, shadow
from hf_domino.integration.patch import attach, detach, install, is_installed, register_auto_classes, uninstall
from hf_domino.stats import DecodingStats, timed_phases

__version__ = "0.1.0"
__all__ = [
    "CheckResult",
    "DecodingStats",
    "DominoConfig",
    "DominoDraftModel",
    "ShadowReport",
    "WidthProbe",
    "attach",
    "check_fit",
    "detach",
    "install",
    "is_installed",
    "probe_width",
    "release_workspaces",
    "shadow",
    "timed_phases",
    "uninstall",
]

register_auto_classes()
if os.environ.get("HF_DOMINO_NO_PATCH") != "1":
    install()
