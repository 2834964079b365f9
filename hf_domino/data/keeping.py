"""What may look on while the target writes: a keeper of its hidden states, or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class StateKeeper(Protocol):
    """Keeps the hidden states of what is generated; [`~training.StateWriter`] is one."""

    def expect(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse a disk without room for what these prompts may become."""

    def recording(self, prompts: Sequence[Sequence[int]]) -> AbstractContextManager[list[list[int]]]:
        """Keep the states of the forwards inside, over prompts padded on the left; yields a list to put the rows in."""

    def flush(self) -> None:
        """Write what was kept."""


class NoStates:
    """Keeps nothing."""

    def expect(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Need no room."""

    def recording(self, prompts: Sequence[Sequence[int]]) -> AbstractContextManager[list[list[int]]]:
        """Look at nothing."""
        return nullcontext([])

    def flush(self) -> None:
        """Write nothing."""
