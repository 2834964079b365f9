"""Short rows packed into long ones, without leaks: less padding, and the same losses.

A packed row has `position_ids` that begin at 0 again with each of the rows in it. From them the target makes its mask,
and the drafter what its blocks see and what they are scored on. Which rows lie together depends on lengths alone, so it
is the same in every process, epoch and resumed run; the trainer shuffles packed rows as it does others.

Shapes: B batch, S sequence length.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from hf_domino._common.refusal import refusal
from hf_domino.data.counts import RowCounts
from hf_domino.data.encoding import Row
from hf_domino.data.rows import RowDataset, collate_rows, pad_rows

NEEDS_LENGTHS = "Which rows fit together depends on all lengths: load them, or leave packing out."


class PackedRows(Dataset):
    """Rows of a dataset, several in each up to a length; the dataset itself is not copied.

    Args:
        rows (`Dataset`): With a length; its items have `input_ids` and `loss_mask`.
        max_length (`int`): Longest packed row, in tokens.

    Attributes:
        bins (`list[list[int]]`): Which rows lie in each packed one.
        counts (`RowCounts`): Of the rows before they were packed.

    Raises:
        ValueError: If the dataset has no length.

    Example:
    ```python
    >>> from hf_domino.data.packing import PackedRows
    >>> rows = [{"input_ids": [5] * length, "loss_mask": [1] * length} for length in (3, 2, 4, 1)]
    >>> [row["position_ids"] for row in PackedRows(rows, max_length=5)]
    [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]

    ```
    """

    def __init__(self, rows: Any, max_length: int):
        if not hasattr(rows, "__len__"):
            raise refusal("train_dataset with packing", "a dataset with a length", type(rows).__name__, NEEDS_LENGTHS)
        self.rows, self.counts = rows, getattr(rows, "counts", RowCounts())
        self.bins = pack(_lengths(rows), max_length)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Row:
        rows = [self.rows[number] for number in self.bins[index]]
        packed = {name: _joined([row[name] for row in rows]) for name in rows[0]}
        return packed | {"position_ids": [place for row in rows for place in range(len(row["input_ids"]))]}


def _joined(values: list[Any]) -> Any:
    """One value per token, of several rows: lists, or tensors `[S, ...]` that rows carry along."""
    return torch.cat(values) if isinstance(values[0], torch.Tensor) else list(itertools.chain.from_iterable(values))


def _lengths(rows: Any) -> list[int]:
    if isinstance(rows, RowDataset):  # which may be too many to look at one by one
        return [length for _, lengths in rows.token_batches() for length in lengths.tolist()]
    if hasattr(rows, "lengths"):  # of rows that carry more than their tokens
        return rows.lengths
    return [len(rows[index]["input_ids"]) for index in range(len(rows))]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the rows in each bin: the longest first, each where it leaves the least room (best fit decreasing)."""
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}  # bins with so much room left
    rooms: list[int] = []  # their keys, increasing
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = bisect.bisect_left(rooms, lengths[index])
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room = rooms[place]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[place]
        bins[chosen].append(index)
        left = room - lengths[index]
        if left > 0 and left not in open_bins:
            bisect.insort(rooms, left)
        if left > 0:
            open_bins.setdefault(left, []).append(chosen)
    return bins


def collate_packed(rows: Sequence[Row], pad_token_id: int = 0, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Pad rows on the right as [`~data.rows.collate_rows`] does, packed ones or not.

    Returns:
        `dict[str, torch.Tensor]`: As there, and of packed rows `position_ids` `[B, S]` int64, in which the padding is a
        row of its own.
    """
    batch = collate_rows(rows, pad_token_id, multiple)
    if "position_ids" in rows[0]:
        position_ids = [torch.as_tensor(row["position_ids"], dtype=torch.int64) for row in rows]
        padding = (1 - batch["attention_mask"]).cumsum(dim=1) - 1
        padded = pad_rows(position_ids, multiple)
        batch["position_ids"] = torch.where(batch["attention_mask"].bool(), padded, padding)
    return batch


def parts(row: Row) -> list[list[int]]:
    """Token ids of each of the rows in a packed one."""
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    ends = [*starts[1:], len(row["position_ids"])]
    return [row["input_ids"][start:end] for start, end in zip(starts, ends, strict=True)]
