"""A loss that is not finite: who is at fault is named, with the step and the way out."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_domino.data.packing import collate_rows
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.faults import find_fault

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


def test_weights_are_named(fails):
    said = fails(lambda target, drafter: target.lm_head.weight[7].data.fill_(NAN))
    assert "The target is at fault: its lm_head is not finite." in said
    said = fails(lambda target, drafter: drafter.fc.weight.data.fill_(NAN), distillation_weight=0.5)
    assert "the loss of step 1 must be finite, got nan. The drafter is at fault" in said
    assert "Lower learning_rate or muon_learning_rate" in said


def test_logits_that_overflow_are_named_by_their_row(target, make_drafter, rows):
    view, batch = TargetModel(target, make_drafter(target).config), collate_rows(rows)
    assert find_fault(view, batch, final=True).startswith("The drafter is at fault")
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight * 3e38)
    assert "its logits are not finite in row 0 of the batch" in find_fault(view, batch, final=True)


def test_distillation_from_a_target_that_gives_no_logits_of_its_last_state_is_refused_before_any_step(
    fails, target, make_drafter, make_trainer, rows, monkeypatch
):
    said = fails(lambda target, drafter: target.lm_head.weight[7].data.fill_(NAN), distillation_weight=0.5)
    assert "the target's logits must be finite, got 'nan or inf'" in said
    whole = target.forward

    def scaled(**inputs):  # a family that does more than lm_head
        outputs = whole(**inputs)
        outputs.logits = outputs.logits * 1.5
        return outputs

    monkeypatch.setattr(target, "forward", scaled)
    with pytest.raises(ValueError, match="of qwen3 must be the logits"):
        make_trainer(make_drafter(target), rows, distillation_weight=0.5).train()
