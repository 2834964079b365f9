"""A folder belongs to one target, one shape and one optimizer: what differs is refused before any work."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_domino import DominoDraftModel
from hf_domino.data.rows import load_rows
from hf_domino.targets.identity import TargetIdentity, identify
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.record import recorded_arguments, run_of
from hf_domino.training.resuming import lock_folder
from hf_domino.training.trainer import DominoTrainer


@pytest.fixture
def other_target(saved_pair, tmp_path) -> Path:
    """A folder called like the target's, of a target with other weights."""
    folder = tmp_path / "elsewhere" / saved_pair[0].name
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved_pair[0])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(saved_pair[0]).save_pretrained(folder)
    return folder


@pytest.fixture
def finished(recipe, train, tmp_path) -> Path:
    """The folder of a finished run of four steps."""
    assert train(recipe | {"eval_file": None}) == 0
    return tmp_path / "run"


def weights_in(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_trained_drafter_names_its_target(finished, saved_pair):
    target = AutoModelForCausalLM.from_pretrained(saved_pair[0])
    for folder in (finished, finished / "checkpoint-4"):
        recorded = TargetIdentity.recorded_in(DominoDraftModel.from_pretrained(folder).config)
        assert recorded == identify(target)
        assert recorded.name == saved_pair[0].name
        assert str(saved_pair[0].parent) not in (folder / "config.json").read_text()


def test_a_finished_run_trains_no_more_until_more_is_asked(finished, recipe, train, capsys):
    before = weights_in(finished)
    for flag in ("--max_steps=4", "--max_steps=3"):
        assert train(recipe, flag) == 0
        assert "eval_walked_acceptance_length" in capsys.readouterr().out
    assert weights_in(finished) == before
    assert train(recipe | {"max_steps": -1, "num_train_epochs": 5.0}) == 0
    assert json.loads((finished / "trainer_state.json").read_text())["global_step"] == 5
    for checkpoint in finished.glob("checkpoint-*"):
        checkpoint.rename(checkpoint.with_name(f"kept_{checkpoint.name[-1]}"))
    assert train(recipe | {"max_steps": 9}) == 2
    assert "must be a folder without a finished run" in capsys.readouterr().err


def test_another_shape_optimizer_or_target_is_refused(finished, recipe, train, other_target, capsys):
    before = weights_in(finished)
    for index, (change, message) in enumerate(
        [
            ({"learning_rate": 0.1}, "learning_rate must be 0.001, with which"),
            ({"muon_learning_rate": 0.01}, "muon_learning_rate must be None, with which"),
            ({"block_size": 6}, "block_size must be 4, with which"),
            ({"target": str(other_target)}, "the target's weights_digest must be"),
        ]
    ):
        max_steps = (4, 6)[index % 2]  # a finished run, and one that goes on
        assert train(recipe | change | {"max_steps": max_steps}) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "Choose another output_dir, or start again (--overwrite true" in said
    assert weights_in(finished) == before


def test_a_copy_in_another_dtype_and_place_goes_on(finished, recipe, train, saved_pair, tmp_path):
    copied = tmp_path / "copy"
    AutoModelForCausalLM.from_pretrained(saved_pair[0], dtype=torch.bfloat16).save_pretrained(copied)
    AutoTokenizer.from_pretrained(saved_pair[0]).save_pretrained(copied)
    assert train(recipe | {"target": str(copied), "target_dtype": "bfloat16", "max_steps": 5, "eval_file": None}) == 0
    assert DominoDraftModel.from_pretrained(finished).config.target_dtype == "bfloat16"


def test_overwriting_starts_again(finished, recipe, train, other_target, tmp_path, capsys):
    assert train(recipe, f"--output_dir={recipe['target']}", "--overwrite", "true") == 2
    assert "output_dir must be a folder without a model that was made elsewhere" in capsys.readouterr().err
    (finished / "notes.txt").write_text("mine")
    (tmp_path / "bad.jsonl").write_text('{"input_ids": "none"}\n')
    assert train(recipe | {"train_file": str(tmp_path / "bad.jsonl")}, "--overwrite", "true") == 2
    assert (finished / "checkpoint-4").exists()  # until the new run can begin
    change = {"target": str(other_target), "block_size": 6, "max_steps": 2, "eval_file": None}
    assert train(recipe | change, "--overwrite", "true") == 0
    assert sorted(path.name for path in finished.glob("checkpoint-*")) == ["checkpoint-2"]
    assert DominoDraftModel.from_pretrained(finished).config.block_size == 6
    assert (finished / "notes.txt").read_text() == "mine"
    assert train(recipe, "--overwrite", "true", f"--resume_from_checkpoint={finished / 'checkpoint-2'}") == 2
    assert "resume_from_checkpoint with overwrite must be None" in capsys.readouterr().err


@pytest.mark.parametrize("spelling", ["{0}", "{0}/", "{0}/../run", "{1}/link"])
def test_a_second_run_in_a_folder_is_refused_however_the_folder_is_spelled(spelling, recipe, train, tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    before = set(tmp_path.iterdir())
    with lock_folder(SimpleNamespace(output_dir=str(folder), process_index=0)):
        assert set(tmp_path.iterdir()) == before  # which may be read-only
        assert train(recipe | {"output_dir": spelling.format(folder, tmp_path)}, "--overwrite", "true") == 2
    assert "output_dir must be a folder that no other training writes to" in capsys.readouterr().err
    assert (folder / "checkpoint-1").is_dir()


def test_a_filesystem_without_locks_is_said(tmp_path, monkeypatch, caplog, word_tokenizer):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "rows.jsonl").write_text('{"text": "t4 t5"}\n')
    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_folder(SimpleNamespace(output_dir=str(tmp_path), process_index=0)):
        assert f"{tmp_path} is on a filesystem without locks. Start no second training in it." in caplog.text
    with pytest.raises(
        ValueError, match=r"the cache of datasets must be on a filesystem with locks, .*HF_DATASETS_CACHE"
    ):
        load_rows(tmp_path / "rows.jsonl", word_tokenizer)


def test_a_run_that_goes_on_logs_as_it_is_asked_to_and_warns_of_nothing(recipe, train, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    recipe |= {"eval_file": None, "save_steps": 0.5}
    for steps in ("4", "8"):
        assert train(recipe, "--logging_steps=0.5", "--max_steps", steps) == 0
    assert "do not match" not in caplog.text
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 4, 8]


def test_the_class_says_where_it_goes_on_and_refuses_the_same(
    target, make_drafter, make_trainer, greedy_rows, tmp_path, caplog
):
    drafter, folder = make_drafter(target), str(tmp_path / "run")
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make_trainer(copy.deepcopy(drafter), greedy_rows, **fields).train()
    assert TargetIdentity.recorded_in(drafter.config) is None
    saved = DominoDraftModel.from_pretrained(f"{folder}/checkpoint-2")
    assert TargetIdentity.recorded_in(saved.config) == identify(target)
    fields["max_steps"] = 3
    make_trainer(copy.deepcopy(drafter), greedy_rows, **fields, logging_steps=1).train(f"{folder}/checkpoint-2")
    assert f"training continues from {folder}/checkpoint-2." in caplog.text
    with pytest.raises(ValueError, match=r"weight_decay must be 0.0, with which .*checkpoint-3 was trained, got 0.1"):
        make_trainer(drafter, greedy_rows, **fields, weight_decay=0.1).train(True)
    for rows in (greedy_rows[:7], [greedy_rows[1], greedy_rows[0], *greedy_rows[2:]]):
        with pytest.raises(
            ValueError, match=r"train_dataset must be '8 examples of digest \w+', with which .* got '[78] "
        ):
            make_trainer(drafter, rows, **fields).train(True)


CHANGES = {
    "num_anchors": 5,
    "loss_decay": 3.0,
    "lambda_base_start": 0.5,
    "lambda_base_decay_ratio": 0.5,
    "position_weights": "dpace",
    "distillation_weight": 1.0,
    "muon_learning_rate": 0.01,
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "warmup_steps": 3,
    "max_grad_norm": 0.5,
    "adam_beta2": 0.5,
    "optim": "sgd",
    "seed": 7,
    "max_length": 20,
    "per_device_train_batch_size": 2,
}


def test_a_run_goes_on_with_its_own_arguments_only(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    """Every argument that changes the loss; other splits of the same batch are the same run."""
    drafter, folder = make_drafter(target), tmp_path / "run"
    make_trainer(copy.deepcopy(drafter), greedy_rows, max_steps=1, save_strategy="steps", save_steps=1).train()
    for name, value in CHANGES.items():
        with pytest.raises(ValueError, match=rf"{name}[ x\w]* must be .*, with which .*checkpoint-1 was trained, got "):
            make_trainer(drafter, greedy_rows, max_steps=2, **{name: value}).train(True)
    same = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 9, "walk_rows": 2}
    state = make_trainer(drafter, greedy_rows, max_steps=2, **same).train(str(folder / "checkpoint-1"))
    assert state.global_step == 2


def test_the_record_says_what_trained(target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target)

    def recorded(optimizer=None, **fields):
        trainer = make_trainer(drafter, greedy_rows, **fields)
        return recorded_arguments(trainer.args, drafter.config, optimizer)

    muon = recorded(muon_learning_rate=0.02)
    assert (muon["optim"], muon["adam_beta2"]) == ("muon_with_adamw", None)
    alone = recorded()
    assert (alone["optim"], alone["adam_beta2"]) == ("adamw_torch_fused", 0.999)
    assert alone["loss_decay"] == 2.7  # of blocks of 6
    assert recorded(position_weights="dpace")["loss_decay"] is None
    arguments = DominoTrainingArguments("unused", report_to="none", use_cpu=True)
    given = torch.optim.SGD(drafter.parameters(), lr=0.1)
    trainer = DominoTrainer(drafter, target, arguments, train_dataset=greedy_rows, optimizers=(given, None))
    assert run_of(trainer).arguments["optim"] == "SGD"
    assert run_of(trainer).arguments["muon_learning_rate"] is None
