"""A loss that is not finite: who is at fault is named, with the step and the way out."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_domino.data.packing import collate_rows
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.faults import find_fault
from hf_domino.training.objective.forward import read_target

RARE = 63  # in one row
NAN = float("nan")


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, RARE, (4, 20), generator=generator)
    ids[2, 3] = RARE
    return [{"input_ids": row, "loss_mask": [1] * 20} for row in ids.tolist()]


@pytest.fixture
def fails(tiny_llama, make_drafter, make_trainer, rows):
    """A function that trains after something was broken, and returns what the error says."""

    def train(break_it, **fields) -> str:
        target = copy.deepcopy(tiny_llama)
        drafter = make_drafter(target)
        trainer = make_trainer(drafter, rows, target=target, **fields)
        break_it(target, drafter)
        with pytest.raises(ValueError, match="finite") as error:
            trainer.train()
        return str(error.value)

    return train


def test_a_row_that_the_target_cannot_read_is_named(fails, rows):
    def spoil(target, drafter):
        target.get_input_embeddings().weight.data[RARE] = NAN

    said = fails(spoil)
    assert "the loss of step 1 must be finite, got nan. The target is at fault: its hidden states of layer" in said
    assert f"which begins with the tokens {', '.join(map(str, rows[2]['input_ids'][:8]))}." in said
    assert "a wider dtype than float32 (--target_dtype float32)" in said
    assert "learning_rate" not in said


def test_weights_of_the_target_are_named(fails):
    said = fails(lambda target, drafter: target.lm_head.weight[7].data.fill_(NAN))
    assert "the loss of step 1 must be finite, got nan. The target is at fault: its lm_head is not finite. Load" in said


def test_the_drafter_is_named_where_the_target_is_whole(fails):
    said = fails(lambda target, drafter: drafter.fc.weight.data.fill_(NAN), distillation_weight=0.5)
    assert "the loss of step 1 must be finite, got nan. The drafter is at fault" in said
    assert "Lower learning_rate or muon_learning_rate" in said


def test_logits_that_overflow_later_are_named_by_their_row(target, make_drafter, rows):
    view, batch = TargetModel(target, make_drafter(target).config), collate_rows(rows)
    read = read_target(view, batch["input_ids"], final=True)
    assert find_fault(view, read, batch).startswith("The drafter is at fault")
    read.final[1, 15] = torch.finfo(torch.float32).max
    assert "its logits are not finite in row 1 of the batch" in find_fault(view, read, batch)


def test_logits_that_are_not_finite_at_first_are_no_matter_of_the_family(fails):
    said = fails(lambda target, drafter: target.lm_head.weight[7].data.fill_(NAN), distillation_weight=0.5)
    assert "the target's logits of its first batch must be finite, got 'nan or inf'" in said
    assert "--target_dtype float32" in said
    assert "family" not in said
