"""`hf-domino train` from YAML and flags, on policy, with resume."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import yaml

from hf_domino import DominoDraftModel
from hf_domino.cli.main import build_parser, main
from hf_domino.cli.train import parse_options


@pytest.fixture
def recipe(saved_pair, tmp_path):
    """Fields of a tiny training, with files that exist."""
    lines = [{"prompt": f"t{4 + i} t5 t6", "completion": "t7 t8 t9 t10 t11 t12 t13 t14"} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "target": str(saved_pair[0]),
        "output_dir": str(tmp_path / "run"),
        "train_file": str(tmp_path / "train.jsonl"),
        "eval_file": str(tmp_path / "train.jsonl"),
        "num_hidden_layers": 1,
        "block_size": 4,
        "shift_label": False,
        "max_steps": 4,
        "save_steps": 2,
        "num_anchors": 4,
        "learning_rate": "1e-3",
        "lr_scheduler_kwargs": {"num_cycles": 0.5},
        "use_cpu": True,
        "report_to": "none",
    }


@pytest.fixture
def train(tmp_path):
    """A function that writes the fields to a YAML file and runs the command with it and further flags."""

    def run(fields, *flags) -> int:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(fields))
        return main(["train", str(path), *flags])

    return run


def test_train_saves_drafter_and_tokenizer_and_prints_acceptance(recipe, train, tmp_path, capsys):
    assert train(recipe) == 0
    drafter = DominoDraftModel.from_pretrained(tmp_path / "run")
    assert (drafter.config.num_hidden_layers, drafter.config.block_size, drafter.config.shift_label) == (1, 4, False)
    assert (tmp_path / "run" / "tokenizer.json").exists()
    assert "eval_walked_acceptance_length" in capsys.readouterr().out
    assert "use_cache" not in json.loads((tmp_path / "run" / "config.json").read_text())


def test_flags_win_and_training_resumes(recipe, train, tmp_path):
    assert train(recipe, "--max_steps", "2") == 0
    assert train(recipe, "--max_steps=4", "--block_size=4") == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 4
    assert not (tmp_path / "run" / "checkpoint-6").exists()


def test_on_policy_and_a_drafter_to_continue(recipe, train, saved_pair, tmp_path):
    for field in ("num_hidden_layers", "block_size", "shift_label"):
        recipe.pop(field)
    recipe |= {"drafter": str(saved_pair[1]), "on_policy": True, "on_policy_max_new_tokens": 12, "bf16": True}
    assert train(recipe, "--on_policy_temperatures", "0.7") == 0
    for split, temperature in (("train", 0.7), ("eval", 0.0)):  # what is evaluated on is written greedily
        lines = (tmp_path / "run" / f"on_policy_{split}-1-of-1.jsonl").read_text().splitlines()
        assert [json.loads(line)["temperature"] for line in lines] == [temperature] * 8


def test_yaml_is_converted_like_flags(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"on_policy_temperatures": [0, 0.5], "target_layer_ids": [0, 1]}))
    arguments = ["train", str(path), "--num_anchors", "9"]
    names, shape, data, args = parse_options(build_parser(arguments).parse_args(arguments))
    assert (args.learning_rate, args.num_anchors, data.on_policy_temperatures) == (1e-3, 9, [0.0, 0.5])
    assert shape.overrides() == {
        "num_hidden_layers": 1, "block_size": 4, "shift_label": False, "target_layer_ids": [0, 1],
    }  # fmt: skip
    assert names.drafter is None


def test_the_example_is_valid(tmp_path):
    arguments = ["train", str(files("hf_domino.training") / "example.yaml"), "--use_cpu", f"--output_dir={tmp_path}"]
    names, shape, data, args = parse_options(build_parser(arguments).parse_args(arguments))
    assert (names.target, shape.block_size, data.on_policy, args.num_anchors) == ("Qwen/Qwen3-8B", 16, True, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocksize": 4}, "field `blocksize` is not known"),
        ({"target": None}, "target must be set"),
        ({"train_file": None}, "train_file must be set"),
        ({"train_file": "none.jsonl"}, "train_file must be a .jsonl or text file, got 'none.jsonl'"),
        ({"eval_file": "none.jsonl"}, "eval_file must be a .jsonl or text file, got 'none.jsonl'"),
        ({"block_size": 1}, "block_size must be at least 2, got 1"),
        ({"drafter": "folder"}, "must not be set with drafter='folder'"),
    ],
)
def test_bad_recipes(change, message, recipe, train, capsys):
    assert train(recipe | change) == 2
    assert message in capsys.readouterr().err
