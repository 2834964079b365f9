"""`hf-domino train --plan`: a table or JSON, and nothing trained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import Qwen3Config

from hf_domino.cli import train as command
from hf_domino.cli.main import main

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
    assert "time at 2 x 10^12 a second (given): at least" in shown
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


def test_pages_have_the_plan_of_the_published_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    QWEN3_8B.save_pretrained("target")
    for name in ("train.jsonl", "eval.jsonl"):
        Path(name).write_text('{"text": "one"}')
    recipe = str(ROOT / "hf_domino" / "training" / "example.yaml")
    assert (
        main(["train", recipe, "--target=target", "--plan", "--json", "--plan-rows=100000", "--plan-tflops=989"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    size = f"{plan['peak_bytes'] / 1e9:.0f} GB"
    drafters, training = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("drafters", "training"))
    assert f"it says {size}" in drafters
    assert f"at least {plan['hours']:.0f} hours" in drafters
    assert f"needs {size}" in training


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
