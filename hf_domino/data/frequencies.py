"""Which tokens a text says most often: those are worth drafting (FR-Spec, arXiv 2502.14856).

Shapes: V tokens of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def count_tokens(rows: Iterable[Mapping[str, Sequence[int]]], vocab_size: int) -> np.ndarray:
    """How often each token is among those with loss, which is what the target writes: `[V]` int64.

    Args:
        rows (`Iterable[Mapping]`): With `input_ids` and `loss_mask`, such as a [`RowDataset`].
        vocab_size (`int`): Tokens of the target (V).
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        written = np.asarray(row["input_ids"], dtype=np.int64)[np.asarray(row["loss_mask"], dtype=bool)]
        np.add.at(counts, written, 1)
    return counts


def most_frequent(counts: Any, size: int) -> list[int]:
    """The tokens with the highest counts, in ascending order; of equally frequent ones the lower ids.

    Args:
        counts (`np.ndarray` or `Sequence[int]`): How often each token comes, `[V]`.
        size (`int`): How many tokens.

    Example:
    ```python
    >>> from hf_domino.data import most_frequent
    >>> most_frequent([0, 7, 2, 9, 2], size=3)
    [1, 2, 3]

    ```
    """
    order = np.argsort(-np.asarray(counts), kind="stable")
    return sorted(order[:size].tolist())
