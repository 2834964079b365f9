"""Checkpoints are whole or not there."""

from __future__ import annotations

import pytest
import torch

from hf_domino.training.runs.checkpoints import last_checkpoint


def test_partial_checkpoints_are_skipped_with_a_word(tmp_path, caplog):
    for step, state in ((2, "{}"), (10, '{"global_st'), (9, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    assert "checkpoint-10, checkpoint-9" in caplog.text
    assert last_checkpoint(tmp_path / "none") is None


def test_weights_that_are_not_finite_are_never_saved(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    drafter = make_drafter(target)
    trainer = make_trainer(drafter, greedy_rows)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"weights after step 0 must be finite, got .*fc.weight \(1 tens"):
        trainer.save_model()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_checkpoint_that_is_written_anew_is_whole_only_at_the_end(
    target, make_drafter, make_trainer, greedy_rows, tmp_path, monkeypatch
):
    fields = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer(make_drafter(target), greedy_rows, **fields).train()
    assert last_checkpoint(tmp_path / "run") is not None
    again = make_trainer(make_drafter(target), greedy_rows, **fields)

    def die(folder):
        raise InterruptedError("a kill inside the save")

    monkeypatch.setattr(again, "_save_rng_state", die)
    with pytest.raises(InterruptedError):
        again.train()
    assert last_checkpoint(tmp_path / "run") is None
