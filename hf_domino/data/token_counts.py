"""Count tokens of examples, and choose the most frequent ones for a draft vocabulary.

Shapes: V tokens of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def count_tokens(rows: Iterable[Mapping[str, Sequence[int]]], vocab_size: int) -> np.ndarray:
    """Count how often each token occurs among the supervised ones, which the target writes, as `[V]` int64.

    Args:
        rows (`Iterable[Mapping]`): Examples with `input_ids` and `loss_mask`, such as a [`RowDataset`].
        vocab_size (`int`): Number of tokens of the target (V).
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        written = np.asarray(row["input_ids"], dtype=np.int64)[np.asarray(row["loss_mask"], dtype=bool)]
        np.add.at(counts, written, 1)
    return counts


def most_frequent(counts: Any, size: int) -> list[int]:
    """Return the ids of the most frequent tokens in ascending order; among equally frequent tokens, lower ids win.

    These tokens are worth drafting (FR-Spec, arXiv 2502.14856).

    Args:
        counts (`np.ndarray` or `Sequence[int]`): How often each token occurs, `[V]`.
        size (`int`): Number of tokens to return.

    Example:
    ```python
    >>> from hf_domino.data import most_frequent
    >>> most_frequent([0, 7, 2, 9, 2], size=3)
    [1, 2, 3]

    ```
    """
    order = np.argsort(-np.asarray(counts), kind="stable")
    return sorted(order[:size].tolist())
