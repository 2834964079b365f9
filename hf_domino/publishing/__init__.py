"""Publish and find drafters: `folder_card` writes a folder's card, and `hub` pushes folders and searches the Hub."""

from hf_domino.publishing.hub import FoundDrafter, PushResult, find, push
from hf_domino.publishing.released import ReleasedDrafter, released

__all__ = ["FoundDrafter", "PushResult", "ReleasedDrafter", "find", "push", "released"]
