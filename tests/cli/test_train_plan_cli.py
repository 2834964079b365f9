"""`hf-domino train --plan`: a table or JSON, and nothing trained."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from hf_domino.cli import train as command
from hf_domino.cli.main import main
from hf_domino.training.scale import plan, probe

ROOT = Path(__file__).parents[2]
QWEN3_8B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    dtype="bfloat16",
)


def test_a_plan_trains_nothing(recipe, train, tmp_path, capsys):
    recipe["max_steps"] = -1
    given = ["--plan", "--plan_tflops", "2", "--plan_memory", "0.001"]
    assert train(recipe, *given) == 0
    shown = capsys.readouterr().out
    assert "together" in shown
    assert "does not fit into 0 GB" in shown
    assert "time at 2 x 10^12 a second (given), of full rows: at least" in shown
    assert "hours for 6 steps" in shown  # 8 rows in batches of 8, six epochs
    assert not (tmp_path / "run").exists()


def test_a_plan_without_text_as_json(recipe, train, capsys):
    recipe.pop("train_file")
    assert train(recipe | {"eval_file": None}, "--plan", "--json", "--plan_rows=100") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["peak_bytes"] == sum(plan["memory"].values())
    assert plan["flops_per_second"] > 1e6  # measured here
    assert plan["steps"] == 4
    assert plan["device_bytes"] > 2**20


def test_the_page_has_the_plan_of_the_published_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    QWEN3_8B.save_pretrained("target")
    for name in ("train.jsonl", "eval.jsonl"):
        Path(name).write_text('{"text": "one"}')
    arguments = ["train", "paper", "--target=target", "--output-dir=run", "--plan", "--json", "--plan-rows=100000"]
    assert main([*arguments, "--plan-tflops=989"]) == 0
    plan = json.loads(capsys.readouterr().out)
    size = f"{plan['peak_bytes'] / 1e9:.0f} GB"
    page = (ROOT / "docs" / "training.md").read_text()
    assert f"needs {size}" in page
    assert f"at least {plan['hours']:.0f} hours" in page


@pytest.mark.parametrize("flag", ["--plan_tflops=0", "--plan_memory=-1"])
def test_flags_of_a_plan_that_make_no_sense(flag, recipe, train, capsys):
    assert train(recipe, "--plan", flag) == 2
    assert "must be above 0 and finite" in capsys.readouterr().err


def test_help_shows_the_defaults_of_transformers(capsys):
    fields = {field.name: field for field in dataclasses.fields(command._groups()[-1])}
    defaults = {name: command._default(fields[name]) for name in command.FROM_TRANSFORMERS}
    said = {name: value for name, value in defaults.items() if value not in (None, False)}
    assert said == command.TRANSFORMERS_DEFAULTS


@pytest.mark.parametrize("value", ["true", "True", None])
def test_sharding_is_asked_for_as_other_switches_are(value, recipe, train, capsys):
    recipe.pop("train_file")
    flags = ["--fsdp"] if value is None else [f"--fsdp={value}"]
    plan = ["--plan", "--json", "--plan_processes=4", "--plan_tflops=1"]
    assert train(recipe | {"eval_file": None}, *flags, *plan) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert 0 < memory["optimizer"] < memory["drafter (fp32)"]  # twice as large where it is whole


def files(*folders):
    """Everything in some folders, with size and time."""
    found = [path for folder in folders for path in Path(folder).rglob("*") if path.name != "recipe.yaml"]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found if path.is_file()}


def generators():
    """What generators of random numbers would give next."""
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cache_hidden_states": "states"},
        {"packing": True, "max_length": 24},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "draft_vocab_size": 40},
    ],
    ids=["", "cached", "packed", "draft vocabulary"],
)
def test_measured_steps_leave_nothing_behind(fields, recipe, train, tmp_path, monkeypatch, capsys):
    from datasets import config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    folders, before = (tmp_path, recipe["target"]), generators()
    there = files(*folders)
    assert train(recipe | fields, "--plan", "--json", "--plan_steps=2") == 0
    plan = json.loads(capsys.readouterr().out)
    assert generators() == before
    assert files(*folders) == there
    assert not (tmp_path / "run").exists()
    assert plan["measured"]["num_steps"] == 2
    assert plan["measured"]["rows_per_step"] == 8
    assert plan["measured"]["seconds_per_step"] > 0
    if "packing" not in fields:
        assert plan["measured"]["anchors_per_step"] == 8 * recipe["num_anchors"]


def test_a_drafter_that_exists_stays_as_it_is(recipe, train, saved_pair, capsys):
    recipe = {name: value for name, value in recipe.items() if name not in ("num_hidden_layers", "shift_label")}
    before = files(saved_pair[1])
    fields = {"drafter": str(saved_pair[1]), "train_only": "head", "lambda_base_start": 0.5}
    assert train({**recipe, **fields, "block_size": 4}, "--plan", "--json", "--plan_steps=1") == 0
    assert json.loads(capsys.readouterr().out)["measured"]["num_steps"] == 1
    assert files(saved_pair[1]) == before


def test_no_bound_stands_above_a_time_that_was_measured(recipe, train, monkeypatch, capsys):
    monkeypatch.setattr(plan, "measure_flops", lambda *args: 1.0)  # by which a step takes years
    assert train(recipe, "--plan", "--plan_steps=1") == 0
    shown = capsys.readouterr().out
    assert "at least" not in shown
    assert len(re.findall("hours for 4 steps", shown)) == 1


def test_slow_steps_are_few(recipe, train, monkeypatch, capsys):
    monkeypatch.setattr(probe, "ENOUGH", 0.0)
    assert train(recipe, "--plan", "--plan_steps=50") == 0
    shown = capsys.readouterr().out
    assert "measured on cpu, over 1 steps of 8 of its rows" in shown
    assert "hours for 4 steps" in shown
    assert f"{4 * 8 * recipe['num_anchors']:,}" in shown


@pytest.mark.parametrize(
    ("fields", "flags", "reason"),
    [
        ({"train_file": None, "eval_file": None}, [], "there is no training text"),
        ({"on_policy": True}, [], "the target has yet to write the training text"),
        ({}, ["--plan_memory=100"], "--plan-memory tells of another device"),
        ({}, ["--plan_steps=0"], "--plan-steps is 0"),
        (
            {"train_only": "head"},
            [],
            "the training does not begin: train_only of a new drafter",
        ),
        ({"num_anchors": 10**9}, [], "a step does not fit into the memory"),
    ],
)
def test_a_plan_says_why_steps_are_not_measured(fields, flags, reason, recipe, train, capsys):
    recipe = {name: value for name, value in (recipe | fields).items() if value is not None}
    assert train(recipe, "--plan", *flags) == 0
    assert f"Steps are not measured: {reason}" in capsys.readouterr().out


def test_a_plan_without_weights(recipe, train, tmp_path, capsys):
    shutil.copytree(recipe["target"], tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert train(recipe | {"target": str(tmp_path / "bare")}, "--plan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["unmeasured"] == "the target's weights are not on this machine"
