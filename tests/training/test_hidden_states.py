"""Hidden states are written once, and training from them is training with the target in the process."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections import namedtuple

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.data.packing import PackedRows, collate_rows
from hf_domino.training.hidden_states import folder as folders
from hf_domino.training.hidden_states import writing
from hf_domino.training.hidden_states.reading import CachedRows, keys_of
from hf_domino.training.hidden_states.writing import StateWriter
from hf_domino.training.runs.resuming import _digest_rows

METRICS = ("loss", "base_loss", "corrected_loss", "acceptance_length", "eval_loss", "eval_walked_acceptance_length")


def logged(trainer) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in METRICS if name in entry]


@pytest.fixture
def cached(target, make_drafter, tmp_path):
    """A function that writes the states of rows and returns these with them; one row a forward, in fp32."""

    def build(rows, config=None, tokens_per_forward=1, **options):
        config, final = config or make_drafter(target).config, options.get("final", False)
        path = tmp_path / options.pop("folder", "states")
        writer = StateWriter(target, config, path, **({"dtype": "auto"} | options))
        writer.write(rows, tokens_per_forward, progress=False)
        return CachedRows(rows, path, target, config, final)

    return build


@pytest.mark.parametrize(
    ("distillation_weight", "shape"),
    [
        *((weight, {"target_layer_ids": [3, 0]}) for weight in (0.0, 0.5)),
        (0.0, {"projector_type": "medusa"}),
        (0.5, {"projector_type": "eagle3"}),
    ],
)
def test_training_from_states_of_the_same_forwards_is_the_same(
    distillation_weight, shape, target, make_drafter, make_trainer, greedy_rows, cached, monkeypatch
):
    fields = {
        "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "max_steps": 3, "eval_strategy": "epoch", "distillation_weight": distillation_weight,
    }  # fmt: skip
    rows, final = greedy_rows[:4], distillation_weight > 0
    start = make_drafter(target, **shape)
    in_process = make_trainer(copy.deepcopy(start), rows, rows[:2], **fields)
    in_process.train()
    train_rows, eval_rows = (cached(part, start.config, final=final) for part in (rows, rows[:2]))
    from_states = make_trainer(start, train_rows, eval_rows, **fields)
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    from_states.train()
    assert len(logged(in_process)) > 12
    assert logged(from_states) == logged(in_process)
    weights = in_process.drafter.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in from_states.drafter.state_dict().items())


def test_a_full_disk_is_named_and_leaves_whole_shards_alone(greedy_rows, cached, no_file_beyond, tmp_path):
    rows = cached(greedy_rows[:2])
    with (
        no_file_beyond(1000),
        pytest.raises(OSError, match=r"states-\w+.safetensors could not be written: File too large"),
    ):
        cached(greedy_rows)
    assert [path.suffix for path in (tmp_path / "states").glob("states-*")] == [".safetensors"]
    assert (rows.states.find(keys_of(greedy_rows)[0])[:, 0] >= 0).tolist() == [True] * 2 + [False] * 6
    cached(greedy_rows)


def test_batches_are_padded_and_read_by_other_processes(greedy_rows, cached):
    rows = cached(greedy_rows, tokens_per_forward=200)
    loader = DataLoader(rows, batch_size=3, collate_fn=collate_rows, num_workers=1)
    batch = next(iter(loader))
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert batch["hidden_states"].shape == (3, max(lengths), rows.states.settings.num_states, 32)
    for index, length in enumerate(lengths):
        assert torch.equal(batch["hidden_states"][index, :length], rows[index]["hidden_states"])
        assert not batch["hidden_states"][index, length:].any()


def test_packed_rows_carry_the_states_of_each_row(greedy_rows, cached):
    rows = cached(greedy_rows, tokens_per_forward=200)
    assert rows.lengths == [len(row["input_ids"]) for row in greedy_rows]
    packed = PackedRows(rows, max_length=100)
    assert max(map(len, packed.bins)) == 2
    for bin_rows, row in zip(packed.bins, packed, strict=True):
        assert torch.equal(row["hidden_states"], torch.cat([rows[index]["hidden_states"] for index in bin_rows]))
    digests = {_digest_rows(some) for some in (greedy_rows, rows, packed)}
    assert len(digests) == 1


def test_a_killed_writer_goes_on_with_other_processes(target, make_drafter, greedy_rows, cached, tmp_path, monkeypatch):
    config, path = make_drafter(target).config, tmp_path / "states"
    expected = [row["hidden_states"] for row in cached(greedy_rows, tokens_per_forward=100)]
    shutil.rmtree(path)

    def killed_inside(tensors, file):
        if len(list(path.glob("states-*.safetensors"))) == 1:
            file.write_bytes(b"half of a shard")
            raise KeyboardInterrupt
        save_file(tensors, file)

    fields = {"dtype": "auto", "max_shard_bytes": 20_000}
    monkeypatch.setattr(folders, "save_file", killed_inside)
    with pytest.raises(KeyboardInterrupt):
        StateWriter(target, config, path, **fields, shard=(0, 2)).write(greedy_rows, 100, False)
    monkeypatch.undo()
    before = {file: file.stat().st_mtime_ns for file in path.glob("states-*.safetensors")}
    assert len(before) == 1
    for process in range(3):
        StateWriter(target, config, path, **fields, shard=(process, 3)).write(greedy_rows, 100, False)
    assert before.items() <= {file: file.stat().st_mtime_ns for file in path.glob("states-*.safetensors")}.items()
    rows = CachedRows(greedy_rows, path, target, config)
    assert all(torch.equal(row["hidden_states"], states) for row, states in zip(rows, expected, strict=True))


def test_runs_that_write_to_one_folder_at_once_leave_each_other_alone(
    target, make_drafter, greedy_rows, tmp_path, monkeypatch
):
    config, path, begun = make_drafter(target).config, tmp_path / "states", []

    def another_begins(tensors, file):
        save_file(tensors, file)
        if not begun:
            begun.append(file)
            StateWriter(target, config, path).write(greedy_rows, 400, False)

    monkeypatch.setattr(folders, "save_file", another_begins)
    StateWriter(target, config, path).write(greedy_rows, 400, False)
    assert not list(path.glob("*.part-*"))
    assert len(CachedRows(greedy_rows, path, target, config)) == len(greedy_rows)


@pytest.mark.parametrize("byte", [b"\0", b"\xff"], ids=["zeros", "nan"])
def test_bytes_that_a_disk_lost_are_refused_and_written_again(byte, target, make_drafter, greedy_rows, cached):
    config = make_drafter(target).config
    expected = [row["hidden_states"].clone() for row in cached(greedy_rows, config, max_shard_bytes=20_000)]
    path = cached(greedy_rows, config).states.path
    shards = sorted(path.glob("states-*.safetensors"))
    assert len(shards) > 1
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-600] + byte * 512 + whole[-88:])
    rows, message = (
        cached(greedy_rows, config),
        rf"{shards[0].name}: the checksum of tokens .* Delete this file and run",
    )
    with pytest.raises(ValueError, match=message):
        list(rows)
    shards[0].unlink()
    assert all(
        torch.equal(row["hidden_states"], states)
        for row, states in zip(cached(greedy_rows, config), expected, strict=True)
    )


def test_a_row_is_checked_once_by_any_process(greedy_rows, cached, monkeypatch):
    rows = cached(greedy_rows)
    loader = DataLoader(rows, batch_size=3, collate_fn=collate_rows, num_workers=1)
    assert len(list(loader)) == 3
    monkeypatch.setattr(folders, "checksum", lambda states: pytest.fail("checked again"))
    assert len(list(rows)) == 8


def test_states_that_a_type_cannot_hold_are_refused(target, greedy_rows, cached):
    target.model.layers[1].mlp.down_proj.weight.data.mul_(1e6)
    with pytest.raises(ValueError, match="hidden states in float16 must be finite, got 'inf or nan'"):
        cached(greedy_rows, dtype="float16")


def test_what_does_not_belong_is_refused(target, make_drafter, make_trainer, greedy_rows, cached, tmp_path):
    drafter, path = make_drafter(target), tmp_path / "states"
    rows = cached(greedy_rows, drafter.config, tokens_per_forward=400)
    with pytest.raises(ValueError, match=r"without row 1 \(1 of 2 are missing\)"):
        CachedRows([greedy_rows[0], {"input_ids": [5, 6]}], path, target, drafter.config)
    with pytest.raises(
        ValueError, match=r"cache_dtype must be 'float32', with which .* got 'bfloat16'. Delete .*states"
    ):
        StateWriter(target, drafter.config, path)
    other = make_drafter(target, target_layer_ids=[0, 1])
    with pytest.raises(ValueError, match=r"target_layer_ids must be .*, got \[0, 1\]. Delete .*states"):
        CachedRows(greedy_rows, path, target, other.config)
    with pytest.raises(ValueError, match=r"target_layer_ids must be .*, got \[0, 1\]"):
        make_trainer(other, rows)
    with pytest.raises(ValueError, match="with the final one, which distillation reads, got 'without'"):
        make_trainer(drafter, rows, distillation_weight=0.5).train()
    with pytest.raises(ValueError, match="with the final one, which distillation reads, got 'without'"):
        CachedRows(greedy_rows, path, target, drafter.config, final=True)
    target.model.layers[0].mlp.up_proj.weight.data.normal_()
    with pytest.raises(ValueError, match=r"the target's weights_digest must be .* Delete .*states"):
        CachedRows(greedy_rows, path, target, drafter.config)
    (shard,) = path.glob("states-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"states-\w+.safetensors must be a shard .* Delete this file"):
        CachedRows(greedy_rows, path, target, drafter.config)
    (path / "index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json must be the index of hidden states"):
        CachedRows(greedy_rows, path, target, drafter.config)


def test_a_full_disk_is_refused_before_any_forward(target, greedy_rows, cached, monkeypatch, caplog):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: usage(1000))
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    tokens = sum(len(row["input_ids"]) for row in greedy_rows)
    with pytest.raises(ValueError, match=rf"must be at least .* GB, for {tokens} tokens, got '1e-06 GB'"):
        cached(greedy_rows, dtype="bfloat16")
    assert f"{tokens} tokens of 64 bytes (1 states of 32 in bfloat16)" in caplog.text


def test_the_command_loads_no_more_than_it_uses(recipe, train, saved_pair, tmp_path, monkeypatch):
    recipe |= {"cache_hidden_states": str(tmp_path / "states")}
    assert train(recipe) == 0
    settings = json.loads((tmp_path / "states" / "index.json").read_text())
    assert (settings["dtype"], settings["target"]["name"]) == ("bfloat16", saved_pair[0].name)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["target_weights_digest"] == settings["target"]["weights_digest"]
    monkeypatch.setattr(folders, "save_file", lambda *args: pytest.fail("states were written again"))
    monkeypatch.setattr(
        "hf_domino.training.hidden_states.command.whole_target", lambda *args: pytest.fail("all of it was loaded")
    )
    assert train(recipe, "--max_steps", "5") == 0
    again = json.loads((tmp_path / "run" / "config.json").read_text())
    assert again["target_weights_digest"] == config["target_weights_digest"]


@pytest.mark.slow
def test_two_processes_write_and_train_as_one(recipe, tmp_path):
    weights = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
        path, world = tmp_path / f"recipe{len(weights)}.yaml", 1 + bool(launcher)
        fields = recipe | {"output_dir": str(tmp_path / path.stem), "cache_hidden_states": str(tmp_path / f"s{world}")}
        fields |= {"per_device_train_batch_size": 4 // world, "optim": "sgd", "max_steps": 2, "cache_dtype": "auto"}
        # Steps are large beside the tolerance.
        fields |= {"num_anchors": 6, "learning_rate": 0.1, "distillation_weight": 0.5, "packing": True}
        fields |= {"max_length": 64}
        path.write_text(yaml.safe_dump(fields))
        command = [sys.executable, *launcher, "-m", "hf_domino.cli", "train", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        weights.append(DominoDraftModel.from_pretrained(tmp_path / path.stem).state_dict())
    assert weights[0]["embed_proj.2.weight"].abs().max() > 1e-3  # which was zero
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_ends_with_the_same_states(saved_pair, greedy_rows, cached, target, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(greedy_rows))
    expected = [row["hidden_states"] for row in cached(greedy_rows)]
    script = """
import json, os, random, signal, sys, threading, time
from transformers import AutoModelForCausalLM
from hf_domino import DominoConfig
from hf_domino.training import StateWriter
target = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
def kill(): time.sleep(random.uniform(0, 0.1)); os.kill(os.getpid(), signal.SIGKILL)
rows = json.load(open(sys.argv[2]))
config = DominoConfig.for_target(target.config)
if sys.argv[4] == "killed": threading.Thread(target=kill, daemon=True).start()
StateWriter(target, config, sys.argv[3], "auto", max_shard_bytes=1).write(rows, 1, False)
"""
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", script, saved_pair[0], tmp_path / "rows.json", folder]
    codes = [subprocess.run([*command, how], capture_output=True).returncode for how in ["killed"] * 4 + ["whole"]]
    assert -9 in codes
    assert codes[-1] == 0
    rows = CachedRows(greedy_rows, folder, target, DominoConfig.for_target(target.config))
    assert all(torch.equal(row["hidden_states"], states) for row, states in zip(rows, expected, strict=True))
