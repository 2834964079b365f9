"""The average of the weights: what it is, that it is what is saved and evaluated, and that training goes on exactly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from hf_domino import DominoDraftModel

DECAY = 0.9
NAME = "norm.weight"


def test_the_average_is_saved_and_training_goes_on_exactly(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    fields = {"ema_decay": DECAY, "save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    drafter = make_drafter(target)
    average = drafter.state_dict()[NAME].clone()
    trainer = make_trainer(drafter, greedy_rows, **fields)
    trainer.train()
    checkpoints = [tmp_path / "run" / f"checkpoint-{step}" for step in (1, 2, 3)]
    for checkpoint in checkpoints:
        average = average.lerp(load_file(checkpoint / "last_step.safetensors")[NAME], 1 - DECAY)
        torch.testing.assert_close(load_file(checkpoint / "model.safetensors")[NAME], average)
    assert torch.equal(trainer.drafter.state_dict()[NAME], load_file(checkpoints[2] / "model.safetensors")[NAME])

    resumed = make_trainer(make_drafter(target), greedy_rows, **fields, output_dir=str(tmp_path / "again"))
    resumed.train(resume_from_checkpoint=str(checkpoints[0]))
    for name, weight in resumed.drafter.state_dict().items():
        assert torch.equal(weight, trainer.drafter.state_dict()[name])


def test_the_average_is_evaluated_and_the_last_step_comes_back(target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target)
    trainer = make_trainer(drafter, greedy_rows, greedy_rows, ema_decay=DECAY, walk_rows=0)
    trainer.average.restart()
    plain = trainer.evaluate()
    with torch.no_grad():
        drafter.norm.weight.zero_()
    assert trainer.evaluate()["eval_loss"] == plain["eval_loss"]
    assert not drafter.norm.weight.any()


def test_a_run_is_not_resumed_with_another_average(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make_trainer(make_drafter(target), greedy_rows, **fields).train()
    DominoDraftModel.from_pretrained(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(ValueError, match="ema_decay must be None"):
        make_trainer(make_drafter(target), greedy_rows, **fields, ema_decay=DECAY).train(resume_from_checkpoint=True)
