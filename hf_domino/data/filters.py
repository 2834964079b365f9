"""Text that is left out of training: copies, near copies, loops, and runs of words or tokens that are measured on.

Near copies are found by MinHash (Broder 1997): the share of hash functions under which two texts have the same smallest
shingle is an estimate of how many shingles they share. A run of 13 words or tokens that two texts share is no chance
(GPT-3, arXiv 2005.14165, appendix C): a training row that shares one with an evaluation row is contaminated. A run
that more than ten training rows hold is a stock phrase and none of it, unless it reaches into an evaluation prompt:
targets say some things often, in the evaluation too. What three different evaluation rows or more have in common, or
every conversation (a system prompt, the template's own words), is no text of theirs: 13 tokens beside it must be
shared, or all chats with the first word of one of the evaluation would be found. Texts below 13 tokens are not looked
for.

Shapes: R rows, T tokens of some rows in one line, G runs of the evaluation.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from hf_domino._common.refusal import refusal
from hf_domino.data.rows import RowDataset

NEAR = 0.8  # share of common shingles from which two texts are near copies
SHINGLE = 8  # bytes of normalised text
NUM_HASHES, BAND = 128, 4  # 32 bands of 4: texts that share 0.8 miss each other once in ten million
NGRAM = 4  # tokens by which loops are found
TAIL = 64  # tokens; a text that falls into a loop does so at its end
RUN = 13  # words or tokens in a row that no two texts share by chance
SHORT_WORDS = 5  # a text of fewer is found only where it is the whole text
ROWS_IN_COMMON = 3
ROWS_WITH_A_STOCK_PHRASE = 10
MODES = ("drop", "error", "keep")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_ODD = np.random.default_rng(0).integers(2**63, size=(NUM_HASHES, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def words_of(text: str) -> list[str]:
    """Split a text into words, without case and punctuation."""
    return re.findall(r"\w+", text.casefold())


def distinct_ngram_ratio(tokens: Sequence[int]) -> float:
    """Compute the share of distinct 4-grams in a text: near 0 where it loops, 1.0 without any repetition.

    Example:
    ```python
    >>> from hf_domino.data.filters import distinct_ngram_ratio
    >>> distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4])
    0.8

    ```
    """
    grams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loops(ids: Sequence[int], min_distinct: float) -> bool:
    """Say whether too few 4-grams of a text, or of its last 64 tokens, are distinct.

    Example:
    ```python
    >>> from hf_domino.data.filters import loops
    >>> loops(list(range(100)) + [1, 2] * 40, min_distinct=0.5), loops(list(range(100)), min_distinct=0.5)
    (True, False)

    ```
    """
    return min(distinct_ngram_ratio(ids), distinct_ngram_ratio(ids[-TAIL:])) < min_distinct


def hash_runs(ids: np.ndarray, length: int = RUN) -> np.ndarray:
    """Hash every run of `length` tokens into 64 bits, `[T]` uint64 -> `[T - length + 1]`."""
    count = max(len(ids) - length + 1, 0)
    mixed = (ids + np.uint64(1)) * MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    hashes = np.zeros(count, np.uint64)
    for offset in range(length):
        hashes = hashes * MULTIPLIER + mixed[offset : offset + count]
    return hashes


class NearCopies:
    """Texts seen, and whether another one is a copy or a near copy of one of them."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._bands: dict[tuple[int, bytes], list[np.ndarray]] = {}  # signatures that have a band

    def find(self, text: str, keep: bool = False) -> str | None:
        """Return `"copy"`, `"near copy"` or None; case, punctuation and white space do not count."""
        normalised = " ".join(words_of(text))
        if normalised in self._exact:
            return "copy"
        signature = _signature(normalised)
        bands = [(start, signature[start : start + BAND].tobytes()) for start in range(0, NUM_HASHES, BAND)]
        near = (other for band in bands for other in self._bands.get(band, ()))
        if any((other == signature).mean() >= NEAR for other in near):
            return "near copy"
        if keep:
            self._exact.add(normalised)
            for band in bands:
                self._bands.setdefault(band, []).append(signature)
        return None

    def add(self, text: str) -> str | None:
        """Look for a text as [`find`] does, and remember it if it is neither."""
        return self.find(text, keep=True)


def _signature(text: str) -> np.ndarray:
    """Compute the smallest hash of a text's shingles under each hash function, `[NUM_HASHES]` uint32."""
    data = np.frombuffer(text.encode("utf-8").ljust(SHINGLE), dtype=np.uint8)
    shingles = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, SHINGLE)).view(np.uint64).ravel()
    mixed = shingles ^ (shingles >> np.uint64(29))  # so that the high bits depend on all bytes
    hashes = (mixed * _ODD) >> np.uint64(32)  # [NUM_HASHES, shingles], modulo 2**64
    return hashes.min(axis=1).astype(np.uint32)


class Exclusions:
    """Texts that training text must not hold, such as the prompts of an evaluation."""

    def __init__(self, texts: Iterable[str]):
        self._copies = NearCopies()
        self._runs: dict[int, set[int]] = {}  # hashes of runs of words, by their length
        for text in texts:
            self._copies.add(text)
            length = min(len(words_of(text)), RUN)
            if length >= SHORT_WORDS:
                self._runs.setdefault(length, set()).update(_word_runs(text, length))

    def overlap(self, text: str) -> bool:
        """Say whether a text is a near copy of an excluded one, or shares 13 words in a row (a shorter one whole)."""
        shares = any(not runs.isdisjoint(_word_runs(text, length)) for length, runs in self._runs.items())
        return shares or self._copies.find(text) is not None


def _word_runs(text: str, length: int) -> list[int]:
    words = np.array([zlib.crc32(word.encode()) for word in words_of(text)], np.uint64)
    return hash_runs(words, length).tolist()


# --- evaluation text in training rows -------------------------------------------------------------------------------


def find_leaks(train: RowDataset, evaluation: RowDataset, frame: Sequence[int] = ()) -> np.ndarray:
    """Find the training rows that share a run of 13 tokens with the evaluation: indices, `[R]` at most.

    `frame` is the token ids that stand in every conversation.

    Example:
    ```python
    >>> from hf_domino.data import RowDataset
    >>> from hf_domino.data.filters import find_leaks
    >>> evaluation, twelve, thirteen = [
    ...     {"input_ids": list(range(*ids)), "loss_mask": [1] * len(range(*ids))}
    ...     for ids in ((100, 120), (99, 112), (99, 113))
    ... ]
    >>> find_leaks(RowDataset([twelve, thirteen]), RowDataset([evaluation])).tolist()
    [1]

    ```
    """
    runs, is_asked = _runs_of(evaluation, np.asarray(frame, dtype=np.uint64))
    if not len(runs):
        return np.empty(0, np.int64)
    found, start = [], 0
    for ids, lengths in train.token_batches():
        row_of = np.repeat(np.arange(start, start + len(lengths)), lengths)  # [T]
        hashes = hash_runs(ids.astype(np.uint64))
        # A search in few sorted ones is much faster than `np.isin`.
        places = np.minimum(np.searchsorted(runs, hashes), len(runs) - 1)
        # A run that goes on into the next row is none.
        is_one = (runs[places] == hashes) & (row_of[: len(hashes)] == row_of[RUN - 1 :])
        found.append(np.unique(np.stack([row_of[: len(hashes)][is_one], places[is_one]], axis=1), axis=0))
        start += len(lengths)
    row, place = np.concatenate(found).T
    is_stock = (np.bincount(place, minlength=len(runs)) > ROWS_WITH_A_STOCK_PHRASE) & ~is_asked
    return np.unique(row[~is_stock[place]])


def keep_apart(train: RowDataset, evaluation: RowDataset, mode: str = "drop", frame: Sequence[int] = ()) -> RowDataset:
    """Leave out training rows that contain text of the evaluation.

    `"drop"` leaves such rows out and counts them, `"error"` refuses them, `"keep"` does not look.
    """
    if mode not in MODES:
        raise refusal("evaluation_leaks", f"one of {', '.join(MODES)}", mode, "The default is drop.")
    if mode == "keep" or not len(found := find_leaks(train, evaluation, frame)):
        return train
    if mode == "error" or len(found) == len(train):
        remedy = "Take other rows for one of them, or set evaluation_leaks to drop (leave out) or keep (train on them)."
        expected = f"without runs of {RUN} tokens that stand in evaluation rows"
        value = f"{len(found)} of {len(train)}, the first is {int(found[0]) + 1}"
        raise refusal("training rows", expected, value, remedy)
    kept = np.setdiff1d(np.arange(len(train)), found)
    tokens = int(np.asarray(train.lengths)[kept].sum())
    counts = replace(train.counts, contaminated=len(found), rows=len(kept), tokens=tokens)
    return RowDataset(train.rows.select(kept), counts)


def _runs_of(evaluation: RowDataset, frame: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hash the evaluation's own runs, sorted `[G]`, and say whether each reaches into a prompt `[G]`."""
    each = map(evaluation.__getitem__, range(len(evaluation)))
    rows = {tuple(row["input_ids"]): np.asarray(row["loss_mask"], bool) for row in each}
    texts = [np.asarray(ids, np.uint64) for ids in rows]
    known, counts = np.unique(np.concatenate([np.unique(hash_runs(ids)) for ids in texts]), return_counts=True)
    shared = np.concatenate([known[counts >= ROWS_IN_COMMON], hash_runs(frame)])
    runs, asked = [], []
    for ids, mask in zip(texts, rows.values(), strict=True):
        hashes, length = hash_runs(ids), min(len(ids), len(frame))
        is_shared = np.zeros(len(ids), dtype=bool)
        is_shared[:length] = np.logical_and.accumulate(ids[:length] == frame[:length])
        for place in np.flatnonzero(np.isin(hashes, shared)):
            is_shared[place : place + RUN] = True
        is_own = _is_free_of(is_shared)
        runs.append(hashes[is_own])
        asked.append(hashes[is_own & ~_is_free_of(~mask)])
    own = np.unique(np.concatenate(runs))
    return own, np.isin(own, np.concatenate(asked))


def _is_free_of(marked: np.ndarray) -> np.ndarray:
    """Say which runs of 13 tokens contain no marked one, `[T]` -> `[T - 12]`."""
    num_marked = np.concatenate([[0], np.cumsum(marked)])
    return num_marked[RUN:] == num_marked[:-RUN]
