"""A loss that is not finite ends training, with the step and the ways out."""

from __future__ import annotations

import copy

import pytest
import torch

NAN = float("nan")


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 64, (4, 20), generator=generator)
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


def test_the_first_loss_that_is_not_finite_ends_training(fails):
    said = fails(lambda target, drafter: target.lm_head.weight[7].data.fill_(NAN))
    assert "the loss of step 1 must be finite, got nan." in said
    assert "--target_dtype float32" in said
    assert "lower learning_rate or muon_learning_rate" in said


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
