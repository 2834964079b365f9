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
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.data.rows import load_rows
from hf_domino.targets.identity import identify
from hf_domino.training import DominoTrainingArguments
from hf_domino.training.hidden_states import folder as folders
from hf_domino.training.hidden_states import writing
from hf_domino.training.hidden_states.folder import CachedRows
from hf_domino.training.hidden_states.writing import StateWriter
from hf_domino.training.objective.anchors import collate_rows

METRICS = ("loss", "base_loss", "corrected_loss", "acceptance_length", "eval_loss", "eval_walked_acceptance_length")


def logged(trainer) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in METRICS if name in entry]


@pytest.fixture
def cached(target, make_drafter, tmp_path):
    """A function that writes the states of rows and returns these with them; one row a forward, in fp32."""

    def build(rows, config=None, tokens_per_forward=1, **options):
        config, final = config or make_drafter(target).config, options.setdefault("final", False)
        path = tmp_path / options.pop("folder", "states")
        writer = StateWriter(target, config, path, **({"dtype": "auto"} | options))
        writer.write(rows, tokens_per_forward, progress=False)
        return CachedRows(rows, path, target, config, final)

    return build


@pytest.mark.parametrize(
    ("distillation_weight", "shape"),
    [(0.5, {"target_layer_ids": [3, 0]}), (0.0, {"projector_type": "dflash"}), (0.5, {"projector_type": "eagle3"})],
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


@pytest.mark.parametrize("final", [True, False])
def test_states_train_with_the_defaults_of_writer_and_trainer(
    final, target, make_drafter, make_trainer, greedy_rows, tmp_path
):
    drafter, path = make_drafter(target), tmp_path / "states"
    options = {} if final else {"final": False}
    StateWriter(target, drafter.config, path, **options).write(greedy_rows, progress=False)
    rows = CachedRows(greedy_rows, path, target, drafter.config, **options)
    weight = DominoTrainingArguments(output_dir=str(tmp_path / "run")).distillation_weight
    trainer = make_trainer(drafter, rows, max_steps=1, distillation_weight=weight)
    if final:
        trainer.train()
        return
    with pytest.raises(ValueError, match=r"hidden states of the examples must be .* that lm_head reads.*final=True"):
        trainer.train()


def test_batches_are_padded_and_read_by_other_processes(greedy_rows, cached):
    rows = cached(greedy_rows, tokens_per_forward=200)
    states = [row["hidden_states"] for row in rows]
    batch = next(iter(DataLoader(rows, batch_size=3, collate_fn=collate_rows, num_workers=1)))
    for padded, expected in zip(batch["hidden_states"], states[:3], strict=True):
        assert torch.equal(padded[: len(expected)], expected)
        assert not padded[len(expected) :].any()


def test_no_states_are_read_for_the_order_of_rows(target, make_drafter, make_trainer, greedy_rows, cached, monkeypatch):
    rows = cached(greedy_rows)
    trainer = make_trainer(make_drafter(target), rows, train_sampling_strategy="group_by_length")
    monkeypatch.setattr(CachedRows, "__getitem__", lambda *args: pytest.fail("states were read"))
    assert sorted(trainer.get_train_dataloader().batch_sampler.sampler) == list(range(len(rows)))


def test_a_killed_writer_goes_on_with_other_processes(target, make_drafter, greedy_rows, cached, tmp_path, monkeypatch):
    config, path = make_drafter(target).config, tmp_path / "states"
    expected = [row["hidden_states"] for row in cached(greedy_rows, tokens_per_forward=100)]
    shutil.rmtree(path)

    def killed_inside(tensors, file):
        if len(list(path.glob("states-*.safetensors"))) == 1:
            file.write_bytes(b"half of a shard")
            raise KeyboardInterrupt
        save_file(tensors, file)

    fields = {"dtype": "auto", "max_shard_bytes": 20_000, "final": False}
    monkeypatch.setattr(folders, "save_file", killed_inside)
    with pytest.raises(KeyboardInterrupt):
        StateWriter(target, config, path, **fields, shard=(0, 2)).write(greedy_rows, 100, False)
    monkeypatch.undo()
    before = {file: file.stat().st_mtime_ns for file in path.glob("states-*.safetensors")}
    assert len(before) == 1
    written = []
    for process in range(3):
        StateWriter(target, config, path, **fields, shard=(process, 3)).write(greedy_rows, 100, False)
        written.append(len(folders.find_rows(path)))
    assert written[0] < written[1] < written[2] == len(greedy_rows)
    assert before.items() <= {file: file.stat().st_mtime_ns for file in path.glob("states-*.safetensors")}.items()
    rows = [row["hidden_states"] for row in CachedRows(greedy_rows, path, target, config, final=False)]
    torch.testing.assert_close(rows, expected)  # of rows in other batches


def test_states_that_a_type_cannot_hold_are_refused(target, greedy_rows, cached):
    target.model.layers[1].mlp.down_proj.weight.data.mul_(1e6)
    with pytest.raises(ValueError, match="hidden states in float16 must be finite, got 'inf or nan'"):
        cached(greedy_rows, dtype="float16")


def test_what_does_not_belong_is_refused(target, make_drafter, greedy_rows, cached, tmp_path):
    drafter, path = make_drafter(target), tmp_path / "states"
    other = make_drafter(target, target_layer_ids=[0, 1])
    cached(greedy_rows, drafter.config)
    (shard,) = path.glob("states-*.safetensors")

    def read(config=drafter.config, **options):
        return CachedRows(greedy_rows, path, target, config, **({"final": False} | options))

    def refuses(message, act):
        with pytest.raises(ValueError, match=message):
            act()

    refuses(
        r"without row 1 \(1 of 2 are missing\)",
        lambda: CachedRows([greedy_rows[0], {"input_ids": [5, 6]}], path, target, drafter.config, final=False),
    )
    refuses(
        r"cache_dtype must be 'float32', the dtype of .* got 'bfloat16'. Delete .*states",
        lambda: StateWriter(target, drafter.config, path, final=False),
    )
    layers = r"target_layer_ids must be .*, got \[0, 1\]. Delete .*states"
    refuses(layers, lambda: read(other.config))
    without = "written with final=True for distillation, got 'without'"
    refuses(without, lambda: read(final=True))
    target.model.layers[0].mlp.up_proj.weight.data.normal_()
    refuses(r"the target's weights_digest must be .* Delete .*states", read)
    shard.write_bytes(shard.read_bytes()[:-1])
    refuses(r"states-\w+.safetensors must be a shard .* Delete this file", read)
    (path / "index.json").write_text("{")
    refuses(r"index\.json must be the index of hidden states", read)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda target: target.config.rope_parameters.update(rope_theta=5e5), "config_digest"),
        (lambda target: target.model.norm.weight.data.mul_(2), "weights_digest"),
        (lambda target: target.model.layers[3].mlp.gate_proj.weight.data.mul_(2), "weights_digest"),
        (lambda target: target.get_input_embeddings().weight.data.mul_(2), "weights_digest"),
    ],
)
def test_states_of_a_target_with_other_values_of_equal_signs_are_refused(
    change, field, target, make_drafter, greedy_rows, cached, tmp_path
):
    config = make_drafter(target).config
    cached(greedy_rows, config)
    change(target)
    with pytest.raises(ValueError, match=rf"the target's {field} must be .* Delete .*states"):
        CachedRows(greedy_rows, tmp_path / "states", target, config)


def test_a_full_disk_is_refused_before_any_forward(target, greedy_rows, cached, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(writing, "disk_usage", lambda path: usage(1000))
    monkeypatch.setattr(target, "forward", lambda *args, **kwargs: pytest.fail("the target ran"))
    tokens = sum(len(row["input_ids"]) for row in greedy_rows)
    with pytest.raises(ValueError, match=rf"at least .* GB: {tokens} tokens of 64 bytes \(1 states .* got '1e-06 GB'"):
        cached(greedy_rows, dtype="bfloat16")


def test_the_command_writes_them_once(recipe, train, saved_pair, tmp_path, monkeypatch):
    recipe |= {"cache_hidden_states": str(tmp_path / "states")}
    assert train(recipe) == 0
    settings = json.loads((tmp_path / "states" / "index.json").read_text())
    assert (settings["dtype"], settings["target"]["name"]) == ("bfloat16", saved_pair[0].name)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["target_weights_digest"] == settings["target"]["weights_digest"]
    monkeypatch.setattr(folders, "save_file", lambda *args: pytest.fail("states were written again"))
    assert train(recipe, "--max_steps", "5") == 0


def test_a_target_in_several_places_writes_for_the_command(recipe, train, saved_pair, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(saved_pair[0])
    modules = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places = modules | {f"model.layers.{index}": ("cpu", "disk")[index % 2] for index in range(4)}
    target = AutoModelForCausalLM.from_pretrained(saved_pair[0], device_map=places)
    assert identify(target).weights_digest == "offloaded"
    config = DominoConfig.for_target(target.config, tokenizer)
    rows = load_rows(recipe["train_file"], tokenizer)
    StateWriter(target, config, tmp_path / "states", final=True).write(rows, progress=False)
    monkeypatch.setattr(type(target), "forward", lambda *args, **inputs: pytest.fail("the target ran"))
    assert train(recipe | {"cache_hidden_states": str(tmp_path / "states"), "distillation_weight": 1.0}) == 0


@pytest.mark.slow
def test_two_processes_write_and_train_as_one(recipe, tmp_path):
    weights = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
        path, world = tmp_path / f"recipe{len(weights)}.yaml", 1 + bool(launcher)
        fields = recipe | {"output_dir": str(tmp_path / path.stem), "cache_hidden_states": str(tmp_path / f"s{world}")}
        fields |= {"per_device_train_batch_size": 4 // world, "optim": "sgd", "max_steps": 2, "cache_dtype": "auto"}
        # Steps are large beside the tolerance.
        fields |= {"num_anchors": 6, "learning_rate": 0.1, "distillation_weight": 0.5}
        path.write_text(yaml.safe_dump(fields))
        command = [sys.executable, *launcher, "-m", "hf_domino.cli", "train", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        weights.append(DominoDraftModel.from_pretrained(tmp_path / path.stem).state_dict())
    assert weights[0]["embed_proj.2.weight"].abs().max() > 5e-4  # which was zero
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)
