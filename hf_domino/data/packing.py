"""Rows in batches: padded, and short ones packed into long ones, without leaks: less padding, and the same losses.

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
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hf_domino._common.refusal import refusal
from hf_domino.data.chat import Row
from hf_domino.data.rows import RowCounts

STATES = "hidden_states"  # of rows that carry the target's, `[S, C, H]`
NEEDS_LENGTHS = "Which rows fit together depends on all lengths: load them, or leave packing out."


class PackedRows(Dataset):
    """Rows of a dataset with a length, several in each up to `max_length` tokens; the dataset itself is not copied.

    `bins` says which rows lie in each packed one.

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
        lengths = rows.lengths if hasattr(rows, "lengths") else [len(row["input_ids"]) for row in rows]
        self.bins = pack(lengths, max_length)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Row:
        rows = [self.rows[number] for number in self.bins[index]]
        packed: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            is_tensor = isinstance(values[0], torch.Tensor)  # `[S, ...]`, which rows carry along
            packed[name] = torch.cat(values) if is_tensor else [*itertools.chain.from_iterable(values)]
        return packed | {"position_ids": [place for row in rows for place in range(len(row["input_ids"]))]}


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Sort rows into bins by best fit decreasing, and return the indices of each bin's rows."""
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
        if left > 0:
            if left not in open_bins:
                bisect.insort(rooms, left)
            open_bins.setdefault(left, []).append(chosen)
    return bins


def collate_rows(rows: Sequence[dict[str, Any]], pad_token_id: int = 0, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Pad rows on the right, packed ones or not, to a length S that is a multiple.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `loss_mask` and `attention_mask`, `[B, S]` int64; of packed rows
        `position_ids` too, in which the padding is a row of its own, and of rows that carry them `hidden_states`
        `[B, S, C, H]`.

    Raises:
        ValueError: If they are not such rows, but records of text from a dataset without length.
    """
    if "loss_mask" not in rows[0]:
        fields = ", ".join(f"`{field}`" for field in rows[0])
        raise ValueError(f"rows must have `input_ids` and `loss_mask`, got {fields}: load them with load_rows.")
    names = ("input_ids", "loss_mask", "position_ids")
    columns = {
        name: [torch.as_tensor(row[name], dtype=torch.int64) for row in rows] for name in names if name in rows[0]
    }
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    if STATES in rows[0]:
        columns[STATES] = [row[STATES] for row in rows]
    batch = {
        name: _padded(values, multiple, pad_token_id if name == "input_ids" else 0) for name, values in columns.items()
    }
    if "position_ids" in batch:
        padding = (1 - batch["attention_mask"]).cumsum(dim=1) - 1
        batch["position_ids"] = torch.where(batch["attention_mask"].bool(), batch["position_ids"], padding)
    return batch


def _padded(rows: list[torch.Tensor], multiple: int, value: int) -> torch.Tensor:
    """Stack rows `[S, ...]` of several lengths, padded on the right to a multiple."""
    padded = pad_sequence(rows, batch_first=True, padding_value=value)
    spare = -padded.shape[1] % multiple
    return F.pad(padded, (0, 0) * (padded.dim() - 2) + (0, spare), value=value) if spare else padded
