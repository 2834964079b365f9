"""Lossless several-fold faster generation for Hugging Face models with Domino speculative decoding."""

from hf_domino.configuration import DominoConfig
from hf_domino.modeling import DominoDraftModel

__version__ = "0.1.0"
__all__ = ["DominoConfig", "DominoDraftModel"]
