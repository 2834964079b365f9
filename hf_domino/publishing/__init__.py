"""Drafters on the Hub: published from a folder, and found by their target.

`folder` says what of a folder is published and checks it, `pushing` sends it, `finding` lists what others published,
`answers` turns what the Hub says into errors with a way out.
"""

from hf_domino.publishing.finding import FoundDrafter, find
from hf_domino.publishing.folder import PlannedFile, PushPlan
from hf_domino.publishing.pushing import PushResult, push

__all__ = ["FoundDrafter", "PlannedFile", "PushPlan", "PushResult", "find", "push"]
