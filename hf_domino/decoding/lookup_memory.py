"""`LookupMemory`: token sequences of this call and of earlier ones, with an index of where their n-grams occurred.

The tokens are in a ring, in which new tokens overwrite the oldest. Each slot of the ring links to the token before it
and to the token after it, so sequences can grow in turns, and sequences that begin alike share the slots of their
beginning: the answers to one prompt, or the turns of a conversation.

The index has a hash table for each length in `ORDERS`, like that of a Lempel-Ziv compressor: from an n-gram to the slot
of the token that followed it last, and from each slot to the one before it in the same bucket. Nothing is ever deleted.
A link into an overwritten slot is recognised by its age, or by tokens that do not match.

A slot plus one is called a place here. Links are places, because 0 stands for no link: memory that is all zero takes
no room before it is written to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hf_domino._common.atomic_writes import atomic_write
from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import check_range

DEFAULT_TOKENS = 1 << 20
LEAST_TOKENS = 64
MOST_TOKENS = 1 << 30  # slots are numbered in 32 bits
ORDERS = (2, 6)  # lengths of the n-grams in the index; a third length found no more
LONGEST_MATCH = 32  # longer matches count as this long
MOST_PLACES = 16  # how many of the latest occurrences of an n-gram are compared; more found no more
MOST_COMPARED = 512  # how many tokens a search compares at most; it then goes on with the places found so far
FEW_TOKENS = 24  # up to here, indexing token by token is faster than with NumPy
PIECE = 1 << 16  # how many tokens are indexed at once; limits the memory that this takes
# The hash of an n-gram is a sum of its tokens times these numbers modulo 2**64, beginning with the last token.
_WEIGHTS = [pow(0x9E3779B97F4A7C15, power, 1 << 64) for power in range(1, ORDERS[-1] + 1)]
_HASH_MASK = (1 << 64) - 1
FORMAT = "hf_domino lookup memory"
VERSION = "1"


@dataclass
class StoredSequence:
    """A sequence in a memory, which can grow.

    Args:
        end (`int`): How many tokens had been stored in the memory when the last token of this sequence was.
        num_tokens (`int`): The number of tokens in the sequence.
    """

    end: int = 0
    num_tokens: int = 0


class LookupMemory:
    """Token sequences that prompt lookup reads in addition to the text so far.

    Set it as `drafter.memory`, or pass it to [`attach`]. Every call with that drafter then uses prompt lookup, proposes
    what followed the same words in earlier calls, and adds its own texts, prompts included. The output of a call never
    depends on what the memory holds.

    A memory is never shared unless you share the object, or its file. Share it only between users who may know each
    other's texts: proposals that are accepted make a call faster, so the time of a call can reveal what the memory
    holds. It holds token ids, so use one memory for models with the same tokenizer.

    Threads can use the same memory. `len(memory)` is the number of tokens in it, and texts that begin alike count once.

    Args:
        max_tokens (`int`, *optional*, defaults to 1048576): How many tokens it holds at most. If there are more, the
            oldest are dropped. It should be larger than the texts of one call together. A token takes 28 bytes.

    Raises:
        ValueError: If `max_tokens` is out of range.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> import hf_domino
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> drafter, ids = hf_domino.recycling(target), torch.tensor([[5, 9, 33]])
    >>> drafter.memory = hf_domino.LookupMemory(max_tokens=100_000)
    >>> _ = target.generate(ids, assistant_model=drafter, max_new_tokens=24, do_sample=False, pad_token_id=0)
    >>> len(drafter.memory)
    27

    ```
    """

    def __init__(self, max_tokens: int = DEFAULT_TOKENS):
        check_range("max_tokens", max_tokens, LEAST_TOKENS, MOST_TOKENS)
        self.max_tokens = max_tokens
        self.lock = threading.RLock()
        # How many tokens were stored so far, and how many there were at the last `clear`. The token that was stored as
        # number n is in slot n modulo the size of the ring.
        self._end = 0
        self._cleared = 0
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the ring and the index."""

        def zeros() -> np.ndarray:
            return np.zeros(self.max_tokens, np.int32)

        self._tokens = zeros()
        self._before = zeros()
        self._after = zeros()
        self._older = [zeros() for _ in ORDERS]  # of each slot, the slot before it in the same bucket
        self._latest = [zeros() for _ in ORDERS]  # the latest slot of each bucket
        self._view()

    def _view(self) -> None:
        """Make views of the arrays whose items are read faster than those of NumPy."""
        self._token_at = self._tokens.data
        self._before_at = self._before.data
        self._after_at = self._after.data
        self._older_at = [array.data for array in self._older]
        self._latest_at = [array.data for array in self._latest]

    def __len__(self) -> int:
        return min(self._end - self._cleared, self.max_tokens)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.max_tokens} tokens)"

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles are memories of their own.
        with self.lock:
            kept = {name: value for name, value in vars(self).items() if not name.endswith(("_at", "lock"))}
            return {name: np.copy(value) if isinstance(value, np.ndarray) else value for name, value in kept.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._older = [np.copy(array) for array in self._older]
        self._latest = [np.copy(array) for array in self._latest]
        self.lock = threading.RLock()
        self._view()

    def clear(self) -> None:
        """Drop all tokens. A call that is running goes on, and stores its further tokens."""
        with self.lock:
            self._cleared = self._end
            self._allocate()

    def add(self, tokens: Sequence[int]) -> StoredSequence:
        """Store a sequence; the tokens at its beginning that are stored already are not stored again.

        Args:
            tokens (`Sequence[int]`): Token ids, such as `tokenizer(text).input_ids`.

        Returns:
            [`StoredSequence`]: The sequence, to which [`~LookupMemory.extend`] appends further tokens.
        """
        tokens = _checked(tokens)
        with self.lock:
            sequence = self._stored_beginning(tokens)
            self.extend(sequence, tokens[sequence.num_tokens :])
        return sequence

    def extend(self, sequence: StoredSequence, tokens: Sequence[int]) -> None:
        """Append tokens to a sequence."""
        with self.lock:
            for start in range(0, len(tokens), min(PIECE, self.max_tokens // 2)):
                piece = tokens[start : start + min(PIECE, self.max_tokens // 2)]
                if len(piece) <= FEW_TOKENS:
                    self._append(sequence, piece)
                else:
                    self._append_many(sequence, piece)
                sequence.num_tokens += len(piece)

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokens to a file, which replaces an older one at once.

        Args:
            path (`str` or `Path`): The file, in the format of safetensors. It takes 8 bytes a token, and holds the
                texts as token ids, readable by anybody.
        """
        with self.lock:
            first = self._end - len(self)
            slots = np.arange(first, self._end) % self.max_tokens
            before = (self._before[slots] - 1 - first) % self.max_tokens  # counted from the oldest token
            has_link = (self._before[slots] > 0) & (before < np.arange(len(slots)))
            tensors = {"tokens": self._tokens[slots], "before": np.where(has_link, before, -1).astype(np.int32)}
        metadata = {"format": FORMAT, "version": VERSION, "max_tokens": str(self.max_tokens)}
        with atomic_write(Path(path)) as aside:
            save_file(tensors, str(aside), metadata)

    @classmethod
    def load(cls, path: str | os.PathLike, max_tokens: int | None = None) -> LookupMemory:
        """Read a memory that [`~LookupMemory.save`] wrote.

        Args:
            path (`str` or `Path`): The file.
            max_tokens (`int`, *optional*): How many tokens the memory holds at most; if the file has more, its oldest
                are left out. Defaults to the number of the memory that was saved.

        Raises:
            ValueError: If the file is not a memory, or `max_tokens` is out of range.
        """
        field = "the file of a lookup memory"
        remedy = f"{path} does not hold one; leave it out, and save a new one."
        try:
            with safe_open(str(path), "np") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
                    raise invalid_argument(field, f"in format {FORMAT!r} {VERSION}", metadata, remedy)
                tokens = file.get_tensor("tokens")
                before = file.get_tensor("before")
        except SafetensorError as error:
            raise invalid_argument(field, "a whole safetensors file", str(error), remedy) from error
        places = np.arange(len(tokens))
        is_whole = tokens.dtype == before.dtype == np.int32 and tokens.shape == before.shape == places.shape
        if not is_whole or (before < -1).any() or (before >= places).any():
            raise invalid_argument(field, "tokens and links to tokens before them", "others", remedy)
        memory = cls(int(metadata["max_tokens"]) if max_tokens is None else max_tokens)
        dropped = max(len(tokens) - memory.max_tokens, 0)
        memory._restore(tokens[dropped:], np.maximum(before[dropped:] - dropped, -1))
        return memory

    def _restore(self, tokens: np.ndarray, before: np.ndarray) -> None:
        """Fill an empty memory with tokens and the index of the token before each; -1 if there is none."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._before[:count] = before + 1
        linked = np.flatnonzero(before >= 0)
        self._after[before[linked]] = linked + 1  # the latest one stays where several follow the same token
        self._end = count
        for start in range(0, count, PIECE):
            self._index_many(np.arange(start, min(start + PIECE, count)))

    # --- storing -----------------------------------------------------------------------------------------------------

    def _last_place(self, sequence: StoredSequence) -> int:
        """The place of the last token of a sequence; 0 if it has none, or if it was overwritten."""
        if sequence.end <= max(self._cleared, self._end - self.max_tokens):
            return 0
        return (sequence.end - 1) % self.max_tokens + 1

    def _stored_beginning(self, tokens: Sequence[int]) -> StoredSequence:
        """Find the stored sequence that has the longest beginning in common with these tokens."""
        order = ORDERS[-1]
        if len(tokens) <= order:
            return StoredSequence()
        newest_first = list(reversed(tokens[:order]))
        bucket = self._buckets(newest_first)[-1]
        for slot in self._chain(len(ORDERS) - 1, bucket):
            place = self._before_at[slot]
            if self._recent(place, order + 1) == newest_first:  # nothing is stored before them
                break
        else:
            return StoredSequence()
        count = order
        while count < len(tokens):
            following = self._child(place, tokens[count])
            if not following:
                break
            place = following
            count += 1
        age = (self._end - place) % self.max_tokens
        return StoredSequence(self._end - age, count)

    def _child(self, place: int, token: int) -> int:
        """The place of this token after another place; 0 if it never followed there."""
        following = self._after_at[place - 1]
        if following and self._token_at[following - 1] == token:
            return following
        if following:  # the text goes on in another way; the index has the others
            bucket = self._buckets(self._recent(place, ORDERS[-1]))[-1]
            for slot in self._chain(len(ORDERS) - 1, bucket):
                if self._before_at[slot] == place and self._token_at[slot] == token:
                    return slot + 1
        return 0

    def _append(self, sequence: StoredSequence, tokens: Sequence[int]) -> None:
        """Append a few tokens, and index what is before each."""
        last = self._last_place(sequence)
        recent = self._recent(last, ORDERS[-1])
        for token in tokens:
            slot = self._end % self.max_tokens
            self._token_at[slot] = token
            self._before_at[slot] = last
            self._after_at[slot] = 0
            if last:
                self._after_at[last - 1] = slot + 1
            for latest, older, bucket in zip(self._latest_at, self._older_at, self._buckets(recent), strict=False):
                older[slot] = latest[bucket]
                latest[bucket] = slot + 1
            recent = [token, *recent[: ORDERS[-1] - 1]]
            last = slot + 1
            self._end += 1
        if tokens:
            sequence.end = self._end

    def _append_many(self, sequence: StoredSequence, tokens: Sequence[int]) -> None:
        """Append many tokens, at most as many as the memory holds."""
        last = self._last_place(sequence)
        slots = np.arange(self._end, self._end + len(tokens)) % self.max_tokens
        self._tokens[slots] = np.asarray(tokens, np.int32)
        self._before[slots[0]] = last
        self._before[slots[1:]] = slots[:-1] + 1
        if last:
            self._after[last - 1] = slots[0] + 1
        self._after[slots[:-1]] = slots[1:] + 1
        self._after[slots[-1]] = 0
        self._end += len(tokens)
        sequence.end = self._end
        self._index_many(slots)

    def _index_many(self, slots: np.ndarray) -> None:
        """Index the n-grams before these slots, the oldest first."""
        hashes = np.zeros(len(slots), np.uint64)
        place = self._before[slots]
        for length, weight in enumerate(_WEIGHTS, start=1):
            tokens = self._tokens[place - 1].astype(np.int64).astype(np.uint64)
            hashes = hashes + tokens * np.uint64(weight)
            if length in ORDERS:
                index = ORDERS.index(length)
                whole = place > 0
                buckets = ((hashes[whole] >> np.uint64(32)) % np.uint64(self.max_tokens)).astype(np.int64)
                self._link_many(index, slots[whole], buckets)
            place = np.where(place > 0, self._before[place - 1], 0)

    def _link_many(self, index: int, slots: np.ndarray, buckets: np.ndarray) -> None:
        """Put slots into the buckets of one of the hash tables, the oldest first."""
        order = np.argsort(buckets, kind="stable")
        slots = slots[order]
        buckets = buckets[order]
        is_first = np.ones(len(slots), bool)
        is_first[1:] = buckets[1:] != buckets[:-1]
        is_last = np.roll(is_first, -1)
        older = np.roll(slots + 1, 1)
        older[is_first] = self._latest[index][buckets[is_first]]
        self._older[index][slots] = older
        self._latest[index][buckets[is_last]] = slots[is_last] + 1

    # --- searching ---------------------------------------------------------------------------------------------------

    def _buckets(self, recent: Sequence[int]) -> list[int]:
        """The bucket of the last tokens in the table of each order, given the newest first."""
        value = 0
        buckets = []
        for length, (token, weight) in enumerate(zip(recent, _WEIGHTS, strict=False), start=1):
            value = (value + token * weight) & _HASH_MASK
            if length in ORDERS:
                buckets.append((value >> 32) % self.max_tokens)
        return buckets

    def _recent(self, place: int, count: int) -> list[int]:
        """The last tokens up to a place, the newest first."""
        tokens: list[int] = []
        while place and len(tokens) < count:
            tokens.append(self._token_at[place - 1])
            place = self._before_at[place - 1]
        return tokens

    def _chain(self, index: int, bucket: int) -> Iterator[int]:
        """Yield the latest slots of a bucket, the newest first."""
        place = self._latest_at[index][bucket]
        older = self._older_at[index]
        size = self.max_tokens
        last_age = -1
        for _ in range(MOST_PLACES):
            age = (self._end - place) % size
            if not place or age <= last_age:  # nothing older, or overwritten
                return
            last_age = age
            yield place - 1
            place = older[place - 1]

    def places(self, sequence: StoredSequence) -> list[tuple[int, int]]:
        """Find where the last tokens of a sequence occurred, the longest matches first, and of these the latest.

        Returns:
            `list`: The length of each match, which is at least 2, and the slot of the token after it.
        """
        recent = self._recent(self._last_place(sequence), LONGEST_MATCH)
        found: dict[int, int] = {}
        compared = 0
        buckets = self._buckets(recent[: ORDERS[-1]])
        for index in reversed(range(len(buckets))):
            for slot in self._chain(index, buckets[index]):
                if slot in found:
                    continue
                length = self._match_at(slot, recent)
                compared += length + 1
                if length >= ORDERS[0]:
                    found[slot] = length
                if compared > MOST_COMPARED:
                    break
            if compared > MOST_COMPARED or len(found) >= MOST_PLACES:
                break
        return sorted(((length, slot) for slot, length in found.items()), key=lambda place: -place[0])

    def _match_at(self, slot: int, recent: Sequence[int]) -> int:
        """How many tokens before a slot equal the last tokens, given the newest first."""
        place = self._before_at[slot]
        for length, token in enumerate(recent):
            if not place or self._token_at[place - 1] != token:
                return length
            place = self._before_at[place - 1]
        return len(recent)

    def age(self, slot: int) -> int:
        """How many tokens were stored after the one in a slot."""
        return (self._end - 1 - slot) % self.max_tokens

    def token_at(self, slot: int) -> int:
        """The token in a slot."""
        return self._token_at[slot]

    def slot_after(self, slot: int) -> int | None:
        """The slot of the token that last followed the one in a slot; None if none did."""
        following = self._after_at[slot]
        if following:
            return following - 1
        return None

    def last_slot(self, sequence: StoredSequence) -> int | None:
        """The slot of the last token of a sequence; None if it has none, or if it was overwritten."""
        last = self._last_place(sequence)
        if last:
            return last - 1
        return None


def check_memory(memory: Any, field: str) -> None:
    """Raise an error if a value is neither a memory nor None."""
    if memory is not None and not isinstance(memory, LookupMemory):
        remedy = "Pass hf_domino.LookupMemory(), or what hf_domino.LookupMemory.load(file) returns."
        raise invalid_argument(field, "a LookupMemory or None", memory, remedy)


def _checked(tokens: Any) -> list[int]:
    """Return token ids as a list; raise an error for anything else."""
    array = np.asarray(tokens if len(tokens) else np.zeros(0, int))
    limits = np.iinfo(np.int32)
    is_whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_whole or ((array < limits.min) | (array > limits.max)).any():
        remedy = "Pass one sequence, such as tokenizer(text).input_ids."
        raise invalid_argument("tokens", "a sequence of token ids of 32 bits", type(tokens).__name__, remedy)
    return array.tolist()
