"""Rows in batches, padded on the right.

Shapes: B batch, S sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

STATES = "hidden_states"  # of rows that carry the target's, `[S, C, H]`


def collate_rows(rows: Sequence[dict[str, Any]], pad_token_id: int = 0, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Pad rows on the right to a length S that is a multiple.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `loss_mask` and `attention_mask`, `[B, S]` int64; of rows that carry
        them `hidden_states` `[B, S, C, H]`, too.

    Raises:
        ValueError: If they are not such rows, but records of text from a dataset without length.
    """
    if "loss_mask" not in rows[0]:
        fields = ", ".join(f"`{field}`" for field in rows[0])
        raise ValueError(f"rows must have `input_ids` and `loss_mask`, got {fields}: load them with load_rows.")
    names = ("input_ids", "loss_mask")
    columns = {name: [torch.as_tensor(row[name], dtype=torch.int64) for row in rows] for name in names}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    if STATES in rows[0]:
        columns[STATES] = [row[STATES] for row in rows]
    return {
        name: _padded(values, multiple, pad_token_id if name == "input_ids" else 0) for name, values in columns.items()
    }


def _padded(rows: list[torch.Tensor], multiple: int, value: int) -> torch.Tensor:
    """Stack rows `[S, ...]` of several lengths, padded on the right to a multiple."""
    padded = pad_sequence(rows, batch_first=True, padding_value=value)
    spare = -padded.shape[1] % multiple
    return F.pad(padded, (0, 0) * (padded.dim() - 2) + (0, spare), value=value) if spare else padded
