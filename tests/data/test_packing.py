"""Packing: which rows lie together, and what a batch of them says."""

from __future__ import annotations

import pytest
import torch

from hf_domino.data.packing import PackedRows, collate_rows, pack
from hf_domino.data.rows import RowDataset


def test_every_row_lies_in_one_bin_that_is_not_too_full():
    lengths = torch.randint(1, 60, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    bins = pack(lengths, 64)
    assert sorted(index for one in bins for index in one) == list(range(500))
    fill = [sum(lengths[index] for index in one) for one in bins]
    assert max(fill) <= 64
    assert sum(fill) > 0.96 * 64 * len(bins)
    assert pack([6, 2, 3, 5, 4, 12], 10) == [[5], [0, 4], [3, 2, 1]]  # where the least room is left
    assert pack([], 10) == []


def test_packed_rows():
    rows = RowDataset(
        [{"input_ids": [*range(start, start + n)], "loss_mask": [1] * n} for start, n in ((4, 5), (20, 7), (40, 3))]
    )
    packed = PackedRows(rows, max_length=10)
    assert len(packed) == 2
    assert packed[0]["input_ids"] == rows[1]["input_ids"] + rows[2]["input_ids"]
    assert packed[0]["position_ids"] == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    batch = collate_rows([packed[0], packed[1]], pad_token_id=2)
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]  # the padding is a row of its own
    assert batch["input_ids"][1, 5:].tolist() == [2] * 5
    assert "position_ids" not in collate_rows([rows[0]])
    with pytest.raises(ValueError, match="train_dataset with packing must be a dataset with a length"):
        PackedRows(iter([]), 10)
