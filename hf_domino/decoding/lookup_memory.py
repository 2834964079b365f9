"""`LookupMemory`: token sequences of this call and of earlier ones, searched for what followed the same tokens.

The tokens are in a ring (`token_ring.py`), and an index says where their n-grams occurred (`ngram_index.py`).
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hf_domino._common.atomic_writes import atomic_write
from hf_domino._common.errors import invalid_argument
from hf_domino._common.forks import Lock
from hf_domino.configuration.checks import check_range
from hf_domino.decoding.ngram_index import MOST_PLACES, ORDERS, NgramIndex
from hf_domino.decoding.token_ring import StoredSequence, TokenRing

DEFAULT_TOKENS = 1 << 20
LEAST_TOKENS = 64
MOST_TOKENS = 1 << 30  # slots are numbered in 32 bits
LONGEST_MATCH = 32  # longer matches count as this long
MOST_COMPARED = 512  # how many tokens a search compares at most; it then goes on with the places found so far
FEW_TOKENS = 24  # up to here, indexing token by token is faster than with NumPy
PIECE = 1 << 16  # how many tokens are indexed at once; limits the memory that this takes
FORMAT = "hf_domino lookup memory"
VERSION = "1"


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
        self.ring = TokenRing(max_tokens)
        self.index = NgramIndex(max_tokens)
        self.lock = _lock_of(self.ring, self.index)

    def __len__(self) -> int:
        return len(self.ring)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.max_tokens} tokens)"

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles are memories of their own.
        with self.lock:
            return {"max_tokens": self.max_tokens, "ring": copy.copy(self.ring), "index": copy.copy(self.index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = _lock_of(self.ring, self.index)

    def clear(self) -> None:
        """Drop all tokens. A call that is running goes on, and stores its further tokens."""
        with self.lock:
            _clear(self.ring, self.index)

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
                last = self.ring.last_place(sequence)
                if len(piece) <= FEW_TOKENS:
                    self._append(piece, last)
                else:
                    self.index.add_many(self.ring.append_many(piece, last), self.ring)
                sequence.end = self.ring.end
                sequence.num_tokens += len(piece)

    def save(self, path: str | os.PathLike) -> None:
        """Write the tokens to a file, which replaces an older one at once.

        Args:
            path (`str` or `Path`): The file, in the format of safetensors. It takes 8 bytes a token, and holds the
                texts as token ids. If it is new, only you can read it; an older one keeps its permissions.
        """
        with self.lock:
            tokens, before = self.ring.stored()
        metadata = {"format": FORMAT, "version": VERSION, "max_tokens": str(self.max_tokens)}
        with atomic_write(Path(path)) as aside:
            aside.touch(mode=0o600)
            save_file({"tokens": tokens, "before": before}, str(aside), metadata)
            if os.path.exists(path):
                shutil.copymode(path, aside)

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
        memory.ring.restore(tokens[dropped:], np.maximum(before[dropped:] - dropped, -1))
        for start in range(0, len(memory), PIECE):
            memory.index.add_many(np.arange(start, min(start + PIECE, len(memory))), memory.ring)
        return memory

    def _stored_beginning(self, tokens: Sequence[int]) -> StoredSequence:
        """Find the stored sequence that has the longest beginning in common with these tokens."""
        order = ORDERS[-1]
        if len(tokens) <= order:
            return StoredSequence()
        newest_first = list(reversed(tokens[:order]))
        bucket = self.index.buckets(newest_first)[-1]
        for slot in self.index.chain(len(ORDERS) - 1, bucket, self.ring.end):
            place = self.ring.before_of[slot]
            if self.ring.recent(place, order + 1) == newest_first:  # nothing is stored before them
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
        age = (self.ring.end - place) % self.max_tokens
        return StoredSequence(self.ring.end - age, count)

    def _child(self, place: int, token: int) -> int:
        """The place of this token after another place; 0 if it never followed there."""
        following = self.ring.after_of[place - 1]
        if following and self.ring.token_of[following - 1] == token:
            return following
        if following:  # the text goes on in another way; the index has the others
            bucket = self.index.buckets(self.ring.recent(place, ORDERS[-1]))[-1]
            for slot in self.index.chain(len(ORDERS) - 1, bucket, self.ring.end):
                if self.ring.before_of[slot] == place and self.ring.token_of[slot] == token:
                    return slot + 1
        return 0

    def _append(self, tokens: Sequence[int], last: int) -> None:
        """Append a few tokens after a place, and index what is before each."""
        recent = self.ring.recent(last, ORDERS[-1])
        for token in tokens:
            slot = self.ring.append(token, last)
            self.index.add(slot, recent)
            recent = [token, *recent[: ORDERS[-1] - 1]]
            last = slot + 1

    def places(self, sequence: StoredSequence) -> list[tuple[int, int]]:
        """Find where the last tokens of a sequence occurred, the longest matches first, and of these the latest.

        Returns:
            `list`: The length of each match, which is at least 2, and the slot of the token after it.
        """
        recent = self.ring.recent(self.ring.last_place(sequence), LONGEST_MATCH)
        found: dict[int, int] = {}
        compared = 0
        buckets = self.index.buckets(recent[: ORDERS[-1]])
        for table in reversed(range(len(buckets))):
            for slot in self.index.chain(table, buckets[table], self.ring.end):
                if slot in found:
                    continue
                length = self.ring.match_length(slot, recent)
                compared += length + 1
                if length >= ORDERS[0]:
                    found[slot] = length
                if compared > MOST_COMPARED:
                    break
            if compared > MOST_COMPARED or len(found) >= MOST_PLACES:
                break
        return sorted(((length, slot) for slot, length in found.items()), key=lambda place: -place[0])


def _clear(ring: TokenRing, index: NgramIndex) -> None:
    ring.clear()
    index.clear()


def _lock_of(ring: TokenRing, index: NgramIndex) -> Lock:
    """Return the lock of a memory; a forked process drops the tokens if another thread was using the memory."""
    return Lock(partial(_clear, ring, index))  # holds no memory, so that a memory that is dropped is freed at once


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
