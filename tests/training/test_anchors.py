"""Batches, and anchors where a loss is carried twice in a row: the same for a row anywhere, others in each epoch."""

from __future__ import annotations

import pytest
import torch

from hf_domino.methods.side_by_side import UNUSED
from hf_domino.training.objective.anchors import collate_rows, sample_anchors

LOSS_MASK = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]])
INPUT_IDS = torch.arange(24).view(2, 12) + 100


def batch(loss_mask: torch.Tensor, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": input_ids, "loss_mask": loss_mask, "attention_mask": torch.ones_like(input_ids)}


def test_sampled_anchors_are_supervised_with_their_successor():
    anchors = sample_anchors(batch(LOSS_MASK, INPUT_IDS), 9, 1)
    assert anchors.tolist() == [[2, 3, 7, 8, 9, 10], [1, 2, *[UNUSED] * 4]]
    some = sample_anchors(batch(LOSS_MASK, INPUT_IDS), 4, 1)[0].tolist()
    assert len(set(some)) == 4
    assert set(some) < {2, 3, 7, 8, 9, 10}
    none = torch.tensor([[0, 1, 0], [1, 0, 1]])
    assert sample_anchors(batch(none, INPUT_IDS[:, :3]), 4, 0).tolist() == [[UNUSED], [UNUSED]]


def test_collated_rows_are_padded_on_the_right():
    batch = collate_rows([{"input_ids": [4, 5], "loss_mask": [0, 1]}, {"input_ids": [6], "loss_mask": [1]}], 2)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[4, 5], [6, 2]], "loss_mask": [[0, 1], [1, 0]], "attention_mask": [[1, 1], [1, 0]]
    }  # fmt: skip
    with pytest.raises(ValueError, match="rows must have `input_ids` and `loss_mask`, got `messages`"):
        collate_rows([{"messages": []}])


def test_a_row_draws_the_same_in_any_batch_at_any_place():
    rows = [
        {"input_ids": ids, "loss_mask": [0] * 3 + [1] * (len(ids) - 3)}
        for ids in torch.randint(4, 64, (6, 40), generator=torch.Generator().manual_seed(1)).tolist()
    ]
    rows = [{name: values[: 15 + 5 * index] for name, values in row.items()} for index, row in enumerate(rows)]

    def drawn(rows, *seeds):
        batch = collate_rows(rows, pad_token_id=9)
        return sample_anchors(batch, 5, *seeds).tolist()

    whole = drawn(rows, 5, 7)
    for some in ([0], [1, 2, 3], [5, 0], [4, 4]):
        assert drawn([rows[index] for index in some], 5, 7) == [whole[index] for index in some]
    assert drawn(rows, 5, 8) != whole


def test_a_row_draws_anew_in_each_epoch(target, make_drafter, make_trainer, greedy_rows):
    trainer = make_trainer(
        make_drafter(target), greedy_rows[:1], max_steps=3, num_anchors=4, learning_rate=0.0, logging_steps=1
    )
    trainer.train()
    losses = [entry["base_loss"] for entry in trainer.state.log_history if "base_loss" in entry]
    assert len(set(losses)) == 3  # of other blocks each, as nothing is learned
