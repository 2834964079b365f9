"""`NgramIndex`: where the n-grams of a [`TokenRing`] occurred.

It has a hash table for each length in `ORDERS`, like that of a Lempel-Ziv compressor: from an n-gram to the slot of the
token that followed it last, and from each slot to the one before it in the same bucket. Nothing is ever deleted. A link
into an overwritten slot is recognised by its age, or by tokens that do not match. Links are places, as in the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hf_domino.decoding.token_ring import TokenRing

ORDERS = (2, 6)  # lengths of the n-grams in the index; a third length did not help
MOST_PLACES = 16  # how many of the latest occurrences of an n-gram are compared; more did not help
# The hash of an n-gram is a sum of its tokens times these numbers modulo 2**64, beginning with the last token.
_WEIGHTS = [pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, ORDERS[-1] + 1)]
_HASH_MASK = (1 << 64) - 1


class NgramIndex:
    """A hash table for each order, with as many buckets as the ring has slots."""

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Forget all n-grams."""
        self._older = [np.zeros(self.size, np.int32) for _ in ORDERS]  # for each slot, the one before it in its bucket
        self._latest = [np.zeros(self.size, np.int32) for _ in ORDERS]  # the latest slot of each bucket
        self._view()

    def _view(self) -> None:
        # Reading a single item of these is faster than reading one of an array.
        self._older_of = [array.data for array in self._older]
        self._latest_of = [array.data for array in self._latest]

    def __getstate__(self) -> dict[str, Any]:
        tables = {"_older": self._older, "_latest": self._latest}
        return {"size": self.size} | {name: [array.copy() for array in arrays] for name, arrays in tables.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view()

    def buckets(self, recent: Sequence[int]) -> list[int]:
        """The bucket of the last tokens in the table of each order, given the newest first."""
        value = 0
        buckets = []
        for length, (token, weight) in enumerate(zip(recent, _WEIGHTS, strict=False), start=1):
            value = (value + token * weight) & _HASH_MASK
            if length in ORDERS:
                buckets.append((value >> 32) % self.size)
        return buckets

    def add(self, slot: int, recent: Sequence[int]) -> None:
        """Index the n-grams before a slot, given the newest token first."""
        for latest, older, bucket in zip(self._latest_of, self._older_of, self.buckets(recent), strict=False):
            older[slot] = latest[bucket]
            latest[bucket] = slot + 1

    def add_many(self, slots: np.ndarray, ring: TokenRing) -> None:
        """Index the n-grams before slots of a ring, the oldest first."""
        hashes = np.zeros(len(slots), np.uint64)
        place = ring.before[slots]
        for length, weight in enumerate(_WEIGHTS, start=1):
            tokens = ring.tokens[place - 1].astype(np.int64).astype(np.uint64)
            hashes = hashes + tokens * np.uint64(weight)
            if length in ORDERS:
                whole = place > 0
                buckets = ((hashes[whole] >> np.uint64(32)) % np.uint64(self.size)).astype(np.int64)
                self._link(ORDERS.index(length), slots[whole], buckets)
            place = np.where(place > 0, ring.before[place - 1], 0)

    def _link(self, table: int, slots: np.ndarray, buckets: np.ndarray) -> None:
        """Put slots into the buckets of one of the hash tables, the oldest first."""
        order = np.argsort(buckets, kind="stable")
        slots = slots[order]
        buckets = buckets[order]
        is_first = np.ones(len(slots), bool)
        is_first[1:] = buckets[1:] != buckets[:-1]
        is_last = np.roll(is_first, -1)
        older = np.roll(slots + 1, 1)
        older[is_first] = self._latest[table][buckets[is_first]]
        self._older[table][slots] = older
        self._latest[table][buckets[is_last]] = slots[is_last] + 1

    def chain(self, table: int, bucket: int, end: int) -> Iterator[int]:
        """Yield the latest slots of a bucket, the newest first.

        Args:
            table (`int`): Which of the hash tables.
            bucket (`int`): The bucket.
            end (`int`): How many tokens the ring has stored so far.
        """
        place = self._latest_of[table][bucket]
        older = self._older_of[table]
        last_age = -1
        for _ in range(MOST_PLACES):
            age = (end - place) % self.size
            if not place or age <= last_age:  # nothing older, or overwritten
                return
            last_age = age
            yield place - 1
            place = older[place - 1]
