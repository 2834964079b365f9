"""Lossless several-fold faster generation for Hugging Face models with Domino speculative decoding."""

import os

from hf_domino.configuration import DominoConfig
from hf_domino.decoding.workspace import release_workspaces
from hf_domino.drift import ShadowReport, shadow
from hf_domino.integration import attach, detach, install, is_installed, register_auto_classes, uninstall
from hf_domino.modeling import DominoDraftModel
from hf_domino.stats import DecodingStats, timed_phases

__version__ = "0.1.0"
__all__ = [
    "DecodingStats",
    "DominoConfig",
    "DominoDraftModel",
    "ShadowReport",
    "attach",
    "detach",
    "install",
    "is_installed",
    "release_workspaces",
    "shadow",
    "timed_phases",
    "uninstall",
]

register_auto_classes()
if os.environ.get("HF_DOMINO_NO_PATCH") != "1":
    install()
