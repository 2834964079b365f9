"""Checkpoints are whole or not there."""

from __future__ import annotations

import pytest
import torch

from hf_domino.training.resuming import last_checkpoint


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


def test_a_full_disk_ends_a_run_in_one_sentence_and_costs_what_came_after_the_last_checkpoint(
    recipe, train, no_file_beyond, tmp_path, capsys
):
    run = tmp_path / "run"
    assert train(recipe | {"max_steps": 2}) == 0
    with no_file_beyond((run / "checkpoint-2" / "model.safetensors").stat().st_size // 2):
        assert train(recipe) == 2
    said = capsys.readouterr().err
    assert f"{run} could not be written: File too large." in said
    assert "What was there before is kept. Make room and run the same command again." in said
    assert last_checkpoint(run) == str(run / "checkpoint-2")
    assert train(recipe) == 0
    assert last_checkpoint(run) == str(run / "checkpoint-4")
