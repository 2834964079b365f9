"""Anchors, labels, weights and visibility against plain loops that share no code with the package."""

from __future__ import annotations

import math

import pytest
import torch

from hf_domino import DominoConfig
from hf_domino.drafter.blocks import UNUSED
from hf_domino.training.objective.anchors import anchor_candidates, block_labels, sample_anchors, seeded_generator

LOSS_MASK = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]])
INPUT_IDS = torch.arange(24).view(2, 12) + 100
CONVENTIONS = pytest.mark.parametrize("shift_label", [True, False])


def config(shift_label: bool, block_size: int = 4) -> DominoConfig:
    return DominoConfig(block_size=block_size, shift_label=shift_label)


def test_candidates_are_supervised_with_their_successor():
    expected = [[2, 3, 7, 8, 9, 10], [1, 2]]
    assert [row.nonzero().flatten().tolist() for row in anchor_candidates(LOSS_MASK)] == expected


def test_sampled_anchors_are_distinct_candidates():
    anchors = sample_anchors(LOSS_MASK, 4, seeded_generator(1))
    assert anchors.shape == (2, 4)
    assert set(anchors[0].tolist()) < {2, 3, 7, 8, 9, 10}
    assert len(set(anchors[0].tolist())) == 4
    assert anchors[1].tolist() == [1, 2, UNUSED, UNUSED]


def test_sampling_is_deterministic_and_independent_of_padding_and_splits():
    whole = sample_anchors(LOSS_MASK, 2, seeded_generator(5, 7))
    generator = seeded_generator(5, 7)
    parts = [sample_anchors(LOSS_MASK[:1], 2, generator), sample_anchors(LOSS_MASK[1:, :7], 2, generator)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, sample_anchors(LOSS_MASK, 2, seeded_generator(5, 8)))


def test_a_batch_without_candidates_gets_one_unused_block():
    anchors = sample_anchors(torch.tensor([[0, 1, 0], [1, 0, 1]]), 4, seeded_generator(0))
    assert anchors.tolist() == [[UNUSED], [UNUSED]]


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
