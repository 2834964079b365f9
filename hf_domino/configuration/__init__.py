"""A drafter's configuration, and what it takes from its target's."""

from hf_domino.configuration.domino_config import DominoConfig

__all__ = ["DominoConfig"]
