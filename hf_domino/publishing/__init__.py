"""Publish and find drafters.

`folder_card` writes the card of a folder, `hub` pushes folders and searches the Hub, and `released` lists known
releases, ours included.
"""

from hf_domino.publishing.hub import FoundDrafter, PushResult, find, push
from hf_domino.publishing.released import ReleasedDrafter, released

__all__ = ["FoundDrafter", "PushResult", "ReleasedDrafter", "find", "push", "released"]
