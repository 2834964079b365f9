"""Anchors, labels, weights and visibility against plain loops that share no code with the package."""

from __future__ import annotations

import math

import pytest
import torch

from hf_domino import DominoConfig
from hf_domino.data.rows import collate_rows
from hf_domino.kinds.view import UNUSED
from hf_domino.training.objective.anchors import anchor_candidates, block_labels, sample_anchors
from hf_domino.training.objective.own_prefixes import choose_own_prefixes

LOSS_MASK = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]])
INPUT_IDS = torch.arange(24).view(2, 12) + 100
CONVENTIONS = pytest.mark.parametrize("shift_label", [True, False])


def config(shift_label: bool, block_size: int = 4) -> DominoConfig:
    return DominoConfig(block_size=block_size, shift_label=shift_label)


def test_candidates_are_supervised_with_their_successor():
    expected = [[2, 3, 7, 8, 9, 10], [1, 2]]
    assert [row.nonzero().flatten().tolist() for row in anchor_candidates(LOSS_MASK)] == expected


def batch(loss_mask: torch.Tensor, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": input_ids, "loss_mask": loss_mask, "attention_mask": torch.ones_like(input_ids)}


def test_sampled_anchors_are_distinct_candidates():
    anchors = sample_anchors(batch(LOSS_MASK, INPUT_IDS), 4, 1)
    assert anchors.shape == (2, 4)
    assert set(anchors[0].tolist()) < {2, 3, 7, 8, 9, 10}
    assert len(set(anchors[0].tolist())) == 4
    assert anchors[1].tolist() == [1, 2, UNUSED, UNUSED]


def test_a_row_draws_the_same_in_any_batch_at_any_place():
    rows = [
        {"input_ids": ids, "loss_mask": [0] * 3 + [1] * (len(ids) - 3)}
        for ids in torch.randint(4, 64, (6, 40), generator=torch.Generator().manual_seed(1)).tolist()
    ]
    rows = [{name: values[: 15 + 5 * index] for name, values in row.items()} for index, row in enumerate(rows)]

    def drawn(rows, *seeds):
        batch = collate_rows(rows, pad_token_id=9)
        batch["anchors"] = sample_anchors(batch, 5, *seeds)
        return batch["anchors"].tolist(), choose_own_prefixes(batch, 0.5, *seeds).tolist()

    whole = drawn(rows, 5, 7)
    for some in ([0], [1, 2, 3], [5, 0], [4, 4]):
        assert drawn([rows[index] for index in some], 5, 7) == tuple([part[index] for index in some] for part in whole)
    others = drawn(rows, 5, 8)
    assert all(one != other for one, other in zip(whole, others, strict=True))


def test_a_row_draws_anew_in_each_epoch(target, make_drafter, make_trainer, greedy_rows, monkeypatch):
    trainer, drawn = make_trainer(make_drafter(target), greedy_rows[:1], max_steps=3, num_anchors=4), []
    label = trainer.objective.label

    def note(batch):
        drawn.append(batch["anchors"].tolist())
        return label(batch)

    monkeypatch.setattr(trainer.objective, "label", note)
    trainer.train()
    assert len(drawn) == 3
    assert all(drawn.count(anchors) == 1 for anchors in drawn)


def test_a_batch_without_candidates_gets_one_unused_block():
    loss_mask = torch.tensor([[0, 1, 0], [1, 0, 1]])
    assert sample_anchors(batch(loss_mask, INPUT_IDS[:, :3]), 4, 0).tolist() == [[UNUSED], [UNUSED]]


@CONVENTIONS
def test_labels_and_weights(shift_label):
    anchors = torch.tensor([[2, 7, 10], [1, 2, UNUSED]])
    labels, weights = block_labels(INPUT_IDS, LOSS_MASK, anchors, config(shift_label), loss_decay=3.0)
    first = 0 if shift_label else 1
    for row in range(2):
        for block in range(3):
            for k in range(4):
                anchor = int(anchors[row, block])
                position = anchor + k + (1 if shift_label else 0)
                expected = 0.0
                if anchor != UNUSED and k >= first and position < 12 and LOSS_MASK[row, position]:
                    expected = math.exp(-max(k - first, 0) / 3.0)
                    assert labels[row, block, k] == INPUT_IDS[row, position]
                assert weights[row, block, k].item() == pytest.approx(expected)
