"""Drafters on the Hub: `folder_card` writes a folder's card, `hub` publishes it and finds what others published."""

from hf_domino.publishing.hub import FoundDrafter, PushResult, find, push

__all__ = ["FoundDrafter", "PushResult", "find", "push"]
