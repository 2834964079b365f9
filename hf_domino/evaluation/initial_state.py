"""Put back what drafters had learnt, so that a measured run does not know its text from an earlier run."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from hf_domino.methods import DominoDraftModel


class InitialState:
    """What drafters that learn while they draft know now.

    Args:
        drafters (`Iterable[DominoDraftModel]`): The drafters. Those that do not learn are left alone.
    """

    def __init__(self, drafters: Iterable[DominoDraftModel]):
        learning = [drafter for drafter in drafters if drafter.config.learns_while_drafting]
        self._states = [(drafter, deepcopy(drafter.state_dict())) for drafter in learning]

    def restore(self) -> None:
        """Put it back."""
        for drafter, state in self._states:
            drafter.load_state_dict(state)
