"""Evaluation text kept out of training text.

The rule is that of GPT-3 (arXiv 2005.14165, appendix C) in tokens: a training row that shares a run of 13 tokens with
an evaluation row is contaminated. A run that more than ten training rows hold is a stock phrase and none of it, unless
it reaches into an evaluation prompt: targets say some things often, in the evaluation too. What three different
evaluation rows or more have in common, or every conversation (a system prompt, the template's own words), is no text of
theirs: 13 tokens beside it must be shared, or all chats with the first word of one of the evaluation would be found.
Texts below 13 tokens are not looked for.

Shapes: R rows, T tokens of some rows in one line, G runs of the evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_domino._common.refusal import refusal
from hf_domino.data.rows import RowDataset

NGRAM = 13
ROWS_IN_COMMON = 3
ROWS_WITH_A_STOCK_PHRASE = 10
MODES = ("drop", "error", "keep")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class LeakCheck:
    """What must not stand in training rows.

    Args:
        rows (`RowDataset`): Of the evaluation.
        frame (`Sequence[int]`, *optional*, defaults to `()`): Token ids that stand in every conversation.

    Example:
    ```python
    >>> from hf_domino.data import RowDataset
    >>> from hf_domino.data.leaks import LeakCheck
    >>> evaluation, twelve, thirteen = [
    ...     {"input_ids": list(range(*ids)), "loss_mask": [1] * len(range(*ids))}
    ...     for ids in ((100, 120), (99, 112), (99, 113))
    ... ]
    >>> LeakCheck(RowDataset([evaluation])).find(RowDataset([twelve, thirteen])).tolist()
    [1]

    ```
    """

    def __init__(self, rows: RowDataset, frame: Sequence[int] = ()):
        texts = ((row["input_ids"], row["loss_mask"]) for row in map(rows.__getitem__, range(len(rows))))
        different = {tuple(ids): (np.asarray(ids, np.uint64), np.asarray(mask, bool)) for ids, mask in texts}
        each = [np.unique(_hash_ngrams(ids)) for ids, _ in different.values()]
        known, counts = np.unique(_joined(each), return_counts=True)
        start = np.asarray(frame, dtype=np.uint64)
        shared = np.concatenate([known[counts >= ROWS_IN_COMMON], _hash_ngrams(start)])
        own = [_own_ngrams(ids, shared, start) for ids, _ in different.values()]
        within_answers = [_runs_without(~mask) for _, mask in different.values()]
        asked = [hashes[is_own & ~answer] for (hashes, is_own), answer in zip(own, within_answers, strict=True)]
        self._ngrams = np.unique(_joined([hashes[is_own] for hashes, is_own in own]))  # [G]
        self._is_asked = np.isin(self._ngrams, _joined(asked))  # [G], whether it reaches into a prompt

    def find(self, rows: RowDataset) -> np.ndarray:
        """Indices of the rows that share a run of 13 tokens with the evaluation, `[R]` at most."""
        found, start = [np.empty((0, 2), np.int64)], 0
        if not len(self._ngrams):
            return found[0][:, 0]
        for ids, lengths in rows.token_batches():
            row_of = np.repeat(np.arange(start, start + len(lengths)), lengths)  # [T]
            hashes = _hash_ngrams(ids.astype(np.uint64))
            # A search in few sorted ones is much faster than `np.isin`.
            places = np.minimum(np.searchsorted(self._ngrams, hashes), len(self._ngrams) - 1)
            # A run that goes on into the next row is none.
            is_one = (self._ngrams[places] == hashes) & (row_of[: len(hashes)] == row_of[NGRAM - 1 :])
            found.append(np.unique(np.stack([row_of[: len(hashes)][is_one], places[is_one]], axis=1), axis=0))
            start += len(lengths)
        row, place = np.concatenate(found).T
        is_stock = (np.bincount(place, minlength=len(self._ngrams)) > ROWS_WITH_A_STOCK_PHRASE) & ~self._is_asked
        return np.unique(row[~is_stock[place]])


def keep_apart(train: RowDataset, evaluation: RowDataset, mode: str = "drop", frame: Sequence[int] = ()) -> RowDataset:
    """Training rows without those that hold text of the evaluation.

    Args:
        train (`RowDataset`): What is trained on.
        evaluation (`RowDataset`): What must not be in it.
        mode (`str`, *optional*, defaults to `"drop"`): `"drop"` leaves such rows out and counts them, `"error"` refuses
            them, `"keep"` does not look.
        frame (`Sequence[int]`, *optional*, defaults to `()`): Token ids that stand in every conversation.

    Raises:
        ValueError: If `mode` is `"error"` and there are such rows, no row is left, or `mode` is none of these.
    """
    if mode not in MODES:
        raise refusal("evaluation_leaks", f"one of {', '.join(MODES)}", mode, "The default is drop.")
    if mode == "keep":
        return train
    found = LeakCheck(evaluation, frame).find(train)
    if not len(found):
        return train
    if mode == "error" or len(found) == len(train):
        remedy = "Take other rows for one of them, or set evaluation_leaks to drop (leave out) or keep (train on them)."
        what = f"without runs of {NGRAM} tokens that stand in evaluation rows"
        raise refusal("training rows", what, f"{len(found)} of {len(train)}, the first is {int(found[0]) + 1}", remedy)
    kept = np.setdiff1d(np.arange(len(train)), found)
    counts = replace(train.counts, contaminated=len(found))
    return train.select(kept.tolist(), counts)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.empty(0, np.uint64)])


def _own_ngrams(ids: np.ndarray, shared: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the runs of an evaluation row `[T]`, and which touch neither what is shared nor a frame before it."""
    hashes = _hash_ngrams(ids)
    length = min(len(ids), len(start))
    is_shared = np.zeros(len(ids), dtype=bool)
    is_shared[:length] = np.logical_and.accumulate(ids[:length] == start[:length])
    for place in np.flatnonzero(np.isin(hashes, shared)):
        is_shared[place : place + NGRAM] = True
    return hashes, _runs_without(is_shared)


def _runs_without(marked: np.ndarray) -> np.ndarray:
    """Which runs of 13 tokens hold no marked one, `[T]` -> `[T - 12]`."""
    num_marked = np.concatenate([[0], np.cumsum(marked)])
    return num_marked[NGRAM:] == num_marked[:-NGRAM]


def _hash_ngrams(ids: np.ndarray) -> np.ndarray:
    """A 64-bit hash of every run of 13 tokens, `[T]` -> `[T - 12]`; two runs share one by chance in 10**19."""
    count = max(len(ids) - NGRAM + 1, 0)
    mixed = (ids + np.uint64(1)) * MULTIPLIER
    mixed ^= mixed >> np.uint64(29)
    hashes = np.zeros(count, np.uint64)
    for offset in range(NGRAM):
        hashes = hashes * MULTIPLIER + mixed[offset : offset + count]
    return hashes
