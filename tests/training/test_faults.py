"""What is not finite, or no distribution at all, ends training with the ways out."""

from __future__ import annotations

import pytest


@pytest.fixture
def trains(target, make_drafter, make_trainer, greedy_rows):
    """A function that trains with the target as it is then, from its distribution or from the text alone."""
    return lambda share: make_trainer(make_drafter(target), greedy_rows, distillation_weight=share).train()


def test_the_first_loss_that_is_not_finite(target, trains):
    target.lm_head.weight[7].data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"the loss of step 1 must be finite, got nan\. .*--target-dtype float32"):
        trains(0.0)
    with pytest.raises(ValueError, match="the target's logits must be finite, got 'nan or inf'"):
        trains(0.5)


def test_distillation_from_a_target_that_gives_no_logits_of_its_last_state(target, trains, monkeypatch):
    whole = target.forward

    def scaled(**inputs):  # a family that does more than lm_head
        outputs = whole(**inputs)
        outputs.logits = outputs.logits * 1.5
        return outputs

    monkeypatch.setattr(target, "forward", scaled)
    with pytest.raises(ValueError, match="of qwen3 must be the logits"):
        trains(0.5)
