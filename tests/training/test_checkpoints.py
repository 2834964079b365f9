"""Checkpoints are whole or not there, whenever a run is killed or another begins; one that is to stop saves first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_domino import DominoDraftModel
from hf_domino.training.runs.checkpoints import last_checkpoint

ROOT = Path(__file__).parents[2]
# Forked from one process that has imported everything and has trained nothing.
SCRIPT = """
import gc, json, os, resource, signal, sys, torch
import transformers.modeling_utils
from transformers import TrainerCallback
from hf_domino.cli.main import main
from hf_domino.training.trainer import DominoTrainer

torch.set_num_threads(1)
gc.freeze()
sys.modules["matplotlib"] = None  # to draw takes longer than to train

def stop_inside_a_save():
    cls = transformers.modeling_utils.PreTrainedModel
    save = cls.save_pretrained
    def stopping(self, folder, *args, **kwargs):
        save(self, folder, *args, **kwargs)
        if "checkpoint-4" in str(folder):
            weights = Path(folder) / "model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGSTOP)
    cls.save_pretrained = stopping

class Then(TrainerCallback):
    def __init__(self, act):
        self.act = act
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.act()

def after_two_steps(act):
    original = DominoTrainer.__init__
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.add_callback(Then(act))
    DominoTrainer.__init__ = init

def fill_disk(share):
    size = int(share * (work / "whole/model.safetensors").stat().st_size)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))  # no file may grow beyond

def start(flags, before=lambda: None):
    if pid := os.fork():
        return pid
    try:
        before()
        os._exit(main(["train", *flags]))
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(99)

def run(*args):
    return os.waitstatus_to_exitcode(os.waitpid(start(*args), 0)[1])

from pathlib import Path
work, flags = Path(sys.argv[1]), sys.argv[2:]
codes = {"whole": run([*flags, f"--output_dir={work / 'whole'}"])}
ACTS = {
    "asked": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "full": lambda: fill_disk(0.5),  # for the weights
    "full for the optimizer": lambda: fill_disk(1.5),
}
for point in ACTS:
    folder = work / point
    mine = [*flags, f"--output_dir={folder}"]
    codes[point] = [run(mine, lambda: after_two_steps(ACTS[point]))]
    codes[point] += [sorted(str(p.relative_to(folder)) for p in folder.glob("*checkpoint-*"))]
    codes[point] += [run(mine)]
folder = work / "held"
mine = [*flags, f"--output_dir={folder}"]
holder = start(mine, stop_inside_a_save)
os.waitpid(holder, os.WUNTRACED)
codes["held"] = [holder, run(mine), sorted(str(p.relative_to(folder)) for p in folder.rglob("*checkpoint-*"))]
os.kill(holder, signal.SIGKILL)
os.waitpid(holder, 0)
codes["held"] += [run(mine), (folder / "_run.lock").exists()]
(work / "codes.json").write_text(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def killed(saved_pair, tmp_path_factory):
    """Work folder with one run per way to end early, each followed by the same command; and their exit codes."""
    work = tmp_path_factory.mktemp("killed")
    (work / "train.jsonl").write_text('{"input_ids": [4, 5, 6, 7, 8, 9, 10, 11]}\n{"input_ids": [9, 8, 7, 6, 5]}\n' * 4)
    fields = {
        "target": saved_pair[0], "train_file": work / "train.jsonl", "num_hidden_layers": 1, "block_size": 4,
        "max_steps": 5, "save_steps": 2, "save_total_limit": 2, "per_device_train_batch_size": 2, "num_anchors": 2,
        "use_cpu": True, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    fields["muon_learning_rate"] = 0  # whose state is twice the weights
    flags = [f"--{name}={value}" for name, value in fields.items()]
    script = work / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels/torch-ext")] + sys.path)}
    done = subprocess.run(
        [sys.executable, str(script), str(work), *flags], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    return work, json.loads((work / "codes.json").read_text()), done.stderr


def weights(folder):
    return DominoDraftModel.from_pretrained(folder).state_dict()


def check_a_run_that_is_asked_to_stop_saves_first(killed):
    work, codes, said = killed
    for point, code in (("asked", 143), ("interrupted", 130)):
        assert codes[point] == [code, ["checkpoint-2", "checkpoint-3"], 0]
    assert "Ctrl-C again stops at once" in said
    assert "stopped by a signal after step 3 of 5" in said
    for folder in ("asked", "interrupted"):
        torch.testing.assert_close(weights(work / folder), weights(work / "whole"), rtol=0, atol=0)


def check_a_full_disk_ends_a_run_in_one_sentence_and_costs_what_came_after_the_last_checkpoint(point, why, killed):
    work, codes, said = killed
    assert codes[point] == [2, ["checkpoint-2"], 0]
    assert f"hf-domino train: {work / point / 'checkpoint-4'} could not be written: {why}. " in said
    assert "Earlier checkpoints are kept. Make room and start the same command again: it goes on from the last" in said
    torch.testing.assert_close(weights(work / point), weights(work / "whole"), rtol=0, atol=0)


def check_a_second_run_in_the_folder_of_a_live_one_is_refused_and_changes_nothing(killed):
    work, codes, said = killed
    holder, second, left, after_its_death, is_locked = codes["held"]
    assert second == 2
    assert f"output_dir must be a folder in which no other run is at work, got '{work / 'held'}'" in said
    assert f"Process {holder} on {socket.gethostname()} holds it. Choose another output_dir, or end that run." in said
    assert left == ["checkpoint-2", "checkpoint-4"]
    assert (after_its_death, is_locked) == (0, False)
    assert "unfinished checkpoint-4" in said
    torch.testing.assert_close(weights(work / "held"), weights(work / "whole"), rtol=0, atol=0)


def test_runs_that_stop_halfway(killed):
    """One test, as its runs take long and are made once."""
    check_a_run_that_is_asked_to_stop_saves_first(killed)
    for point, why in (("full", "File too large"), ("full for the optimizer", "a write fell short")):
        check_a_full_disk_ends_a_run_in_one_sentence_and_costs_what_came_after_the_last_checkpoint(point, why, killed)
    check_a_second_run_in_the_folder_of_a_live_one_is_refused_and_changes_nothing(killed)


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
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # which a killed run does not come to
    with pytest.raises(InterruptedError):
        again.train()
    assert last_checkpoint(tmp_path / "run") is None
