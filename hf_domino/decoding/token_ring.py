"""`TokenRing`: token sequences that grow in turns, in a ring whose new tokens overwrite the oldest.

Each slot of the ring links to the token before it and to the token after it, so sequences that begin alike share the
slots of their beginning: the answers to one prompt, or the turns of a conversation.

A slot plus one is called a place here. Links are places, because 0 stands for no link: memory that is all zero takes
no room before it is written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class StoredSequence:
    """A sequence in a memory, which can grow.

    Args:
        end (`int`): How many tokens had been stored in the memory when the last token of this sequence was.
        num_tokens (`int`): The number of tokens in the sequence.
    """

    end: int = 0
    num_tokens: int = 0


class TokenRing:
    """Tokens in slots, each linked to the token before it and to the one that last followed it.

    Args:
        size (`int`): The number of slots.

    Attributes:
        end (`int`): How many tokens were stored so far. The token that was stored as number n is in slot n modulo
            `size`.
        tokens, before, after (`np.ndarray`): The token in each slot, and the places before and after it.
        token_of, before_of, after_of (`memoryview`): The same, for reading and writing single items, which is faster.
    """

    def __init__(self, size: int):
        self.size = size
        self.end = 0
        self.clear()

    def clear(self) -> None:
        """Drop all tokens."""
        self.cleared = self.end
        self.tokens = np.zeros(self.size, np.int32)
        self.before = np.zeros(self.size, np.int32)
        self.after = np.zeros(self.size, np.int32)
        self._view()

    def _view(self) -> None:
        self.token_of = self.tokens.data
        self.before_of = self.before.data
        self.after_of = self.after.data

    def __len__(self) -> int:
        return min(self.end - self.cleared, self.size)

    def __getstate__(self) -> dict[str, Any]:
        arrays = {"tokens": self.tokens.copy(), "before": self.before.copy(), "after": self.after.copy()}
        return {"size": self.size, "end": self.end, "cleared": self.cleared, **arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view()

    def append(self, token: int, last: int) -> int:
        """Store a token after the one at a place (0 if it is the first), and return its slot."""
        slot = self.end % self.size
        self.token_of[slot] = token
        self.before_of[slot] = last
        self.after_of[slot] = 0
        if last:
            self.after_of[last - 1] = slot + 1
        self.end += 1
        return slot

    def append_many(self, tokens: Sequence[int], last: int) -> np.ndarray:
        """Store tokens after the one at a place, at most as many as there are slots, and return their slots."""
        slots = np.arange(self.end, self.end + len(tokens)) % self.size
        self.tokens[slots] = np.asarray(tokens, np.int32)
        self.before[slots[0]] = last
        self.before[slots[1:]] = slots[:-1] + 1
        if last:
            self.after[last - 1] = slots[0] + 1
        self.after[slots[:-1]] = slots[1:] + 1
        self.after[slots[-1]] = 0
        self.end += len(tokens)
        return slots

    def last_place(self, sequence: StoredSequence) -> int:
        """The place of the last token of a sequence; 0 if it has none, or if it was overwritten."""
        if sequence.end <= max(self.cleared, self.end - self.size):
            return 0
        return (sequence.end - 1) % self.size + 1

    def recent(self, place: int, count: int) -> list[int]:
        """The last tokens up to a place, the newest first."""
        tokens: list[int] = []
        while place and len(tokens) < count:
            tokens.append(self.token_of[place - 1])
            place = self.before_of[place - 1]
        return tokens

    def match_length(self, slot: int, recent: Sequence[int]) -> int:
        """How many tokens before a slot equal the last tokens, given the newest first."""
        place = self.before_of[slot]
        for length, token in enumerate(recent):
            if not place or self.token_of[place - 1] != token:
                return length
            place = self.before_of[place - 1]
        return len(recent)

    def age(self, slot: int) -> int:
        """How many tokens were stored after the one in a slot."""
        return (self.end - 1 - slot) % self.size

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all tokens, the oldest first, and the index of the token before each; -1 if there is none."""
        first = self.end - len(self)
        slots = np.arange(first, self.end) % self.size
        before = (self.before[slots] - 1 - first) % self.size  # counted from the oldest token
        has_link = (self.before[slots] > 0) & (before < np.arange(len(slots)))
        return self.tokens[slots], np.where(has_link, before, -1).astype(np.int32)

    def restore(self, tokens: np.ndarray, before: np.ndarray) -> None:
        """Fill an empty ring with what [`~TokenRing.stored`] returned."""
        count = len(tokens)
        self.tokens[:count] = tokens
        self.before[:count] = before + 1
        linked = np.flatnonzero(before >= 0)
        self.after[before[linked]] = linked + 1  # the latest one stays where several follow the same token
        self.end = count
