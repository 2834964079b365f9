"""The class that adapters of earlier versions belong to, for `peft.AutoPeftModel`: it is imported by this name."""

from hf_domino.methods import DominoDraftModel

__all__ = ["DominoDraftModel"]
