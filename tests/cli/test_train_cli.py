"""`hf-domino train` from YAML and flags, with resume."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.cli.main import main, parse
from hf_domino.cli.train import parse_options


@pytest.mark.parametrize(("bf16", "where"), [("false", ""), ("true", " --device cpu --dtype bfloat16")])
def test_train_saves_drafter_and_tokenizer_and_prints_next_steps(bf16, where, recipe, train, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(recipe | {"target_dtype": "bfloat16"}, "--bf16", bf16) == 0
    config = DominoDraftModel.from_pretrained(run).config
    assert (config.num_hidden_layers, config.block_size, config.shift_label) == (1, 4, False)
    assert (run / "tokenizer.json").exists()
    said = capsys.readouterr().out
    assert "eval_walked_acceptance_length" in said
    assert {"base_loss", "hours"} < json.loads((run / "trainer_state.json").read_text())["log_history"][0].keys()
    logged = [line for line in said.splitlines() if line.startswith("{")]
    assert logged[0].startswith("{'loss': ")
    assert max(map(len, logged)) <= 120
    commands = [line for line in said.splitlines() if line.startswith("  hf-domino ")]
    pair = f"--target {recipe['target']} --drafter {run}{where} --prompts {recipe['eval_file']}"
    ours = f"check {pair}", f"bench {pair} --results {run}/results.jsonl", f"push {run} --card-only"
    assert commands == [f"  hf-domino {command}" for command in ours]
    for command in ours:  # they are what the parser takes
        parse(shlex.split(command))
    assert "| steps | 4 |" in (run / "README.md").read_text()
    assert "use_cache" not in json.loads((run / "config.json").read_text())


def test_the_seed_decides_the_weights_of_a_new_drafter(recipe, train, tmp_path):
    weights = []
    for index, seed in enumerate((0, 0, 1)):
        folder = tmp_path / f"run{index}"
        torch.manual_seed(100 + index)  # whatever ran before in this process
        few = {"eval_file": None, "seed": seed, "max_steps": 1}
        assert train(recipe | few | {"output_dir": str(folder)}) == 0
        weights.append(DominoDraftModel.from_pretrained(folder).fc.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2], atol=0.01)


def test_a_drafter_to_continue(recipe, train, saved_pair, caplog):
    for field in ("num_hidden_layers", "block_size", "shift_label"):
        recipe.pop(field)
    recipe |= {"drafter": str(saved_pair[1]), "eval_file": None, "save_steps": 1}
    assert train(recipe, "--max_steps=1") == 0
    assert "training goes on" not in caplog.text
    assert train(recipe, "--max_steps=2") == 0
    assert "training continues from" in caplog.text  # its own checkpoint


def test_yaml_is_converted_like_flags(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"target_layer_ids": [0, 1]}))
    names, shape, data, args = parse_options(parse(["train", str(path), "--num_anchors", "9"]))
    assert (args.learning_rate, args.num_anchors, data.train_file) == (1e-3, 9, recipe["train_file"])
    given = {"num_hidden_layers": 1, "block_size": 4, "shift_label": False, "target_layer_ids": [0, 1]}
    assert (shape.overrides(), names.drafter) == (given, None)


def test_null_in_yaml_is_none_and_not_the_default(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"muon_learning_rate": None, "adam_beta2": 0.9}))
    args = parse_options(parse(["train", str(path)]))[-1]
    assert (args.muon_learning_rate, args.adam_beta2) == (None, 0.9)
    assert (
        parse_options(parse(["train", str(path), "--muon-learning-rate=0.03", "--adam-beta2=0.999"]))[
            -1
        ].muon_learning_rate
        == 0.03
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", (2e-3, 0.02, 1.0)),
        ("--muon-learning-rate=0", (2e-3, None, 1.0)),
        ("--optim=sgd", (2e-3, None, 1.0)),  # it was asked for
        ("--optim=sgd --muon-learning-rate=0.01", (2e-3, 0.01, 1.0)),
        ("paper", (6e-4, None, 0.0)),
    ],
)
def test_the_recipe_that_is_best_here_needs_no_flags(given, expected, tmp_path):
    args = parse_options(parse(["train", f"--output-dir={tmp_path}", *given.split()]))[-1]
    assert (args.learning_rate, args.muon_learning_rate, args.distillation_weight) == expected


def test_prefixes_of_new_drafters_and_of_files(tiny_qwen3):
    prefixes = {kind: DominoConfig.for_target(tiny_qwen3.config, projector_type=kind) for kind in ("domino", "dflash")}
    assert {kind: config.pure_draft_prefix_len for kind, config in prefixes.items()} == {"domino": 1, "dflash": 0}
    # What a file leaves out means what it did.
    assert DominoConfig.from_dict(DominoConfig().to_diff_dict()).pure_draft_prefix_len == 0


def test_the_published_recipe_has_a_name(tmp_path):
    call = ["--target=Qwen/Qwen3-8B", f"--output_dir={tmp_path}", "--num-anchors=9"]
    names, shape, data, args = parse_options(parse(["train", "paper", *call]))
    assert (names.target, data.train_file) == ("Qwen/Qwen3-8B", None)
    assert (shape.block_size, shape.pure_draft_prefix_len, args.num_anchors) == (16, 1, 9)
    assert (args.bf16, args.max_length) == (True, 3072)
    assert args.use_cpu is not torch.accelerator.is_available()  # its bf16 would be refused without a GPU
    with pytest.raises(ValueError, match="config must be a YAML file or 'paper', got 'papers'"):
        parse_options(parse(["train", "papers", *call]))


@pytest.mark.parametrize("content", [b"target: [a", b"target: \xff"])
def test_a_recipe_that_is_no_yaml_is_named(content, tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    assert main(["train", str(path)]) == 2
    assert f"{path} must be YAML: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocksize": 4}, "field `blocksize` is not known"),
        ({"learning_rate": "fast"}, "argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
        ({"learning_rate": None}, "field `learning_rate` must have a value, got null. Leave it out for its default."),
        (
            {"muon_learning_rate": 0.02, "adam_beta2": 0.9},
            "adam_beta2 with muon_learning_rate must be left out, got 0.9. The AdamW beside Muon has values of its",
        ),
        ({"muon_learning_rate": 0.02, "adam_epsilon": 1e-6}, "adam_epsilon with muon_learning_rate must be left out"),
        ({"muon_learning_rate": 0.02, "optim_args": "a=1"}, "optim_args with muon_learning_rate must be left out"),
        ({"target": None}, "target must be a folder or a Hub name, got None"),
        ({"target": "./none"}, "target must be a folder or a Hub name, got './none'"),
        ({"train_file": None}, "train_file must name a file, folder or data set, got None"),
        (
            {"train_file": "none.jsonl"},
            "train_file (--train-file) must be a file of records, got 'none.jsonl': it does not exist",
        ),
        ({"train_file": "folder"}, "train_file (--train-file) must be a folder with a data set, or a name on the Hub"),
        (
            {"train_file": "folder.jsonl"},
            "train_file (--train-file) must be a file of records, got 'folder.jsonl': it is a",
        ),
        ({"eval_file": "folder"}, "eval_file (--eval-file) must be a folder with a data set"),
        ({"eval_file": "none.jsonl"}, "eval_file (--eval-file) must be a file of records, got 'none.jsonl'"),
        ({"train_file": "beyond.jsonl"}, "beyond.jsonl, line 1: token ids must be in [0, 63]"),
        ({"train_file": "./none"}, "train_file (--train-file) must be a folder with a data set, or a name"),
        ({"max_eval_rows": 0}, "max_eval_rows must be at least 1, got 0"),
        ({"chat_template_kwargs": "no"}, "chat_template_kwargs must be a JSON object, got 'no'"),
        ({"block_size": 1}, "block_size must be in [2, 1024], got 1"),
        ({"drafter": "folder"}, "must be left out with drafter='folder'"),
        ({"markov_rank": 8}, "markov_rank of a Domino drafter must be left out, got 'given'. It has no such part"),
        ({"projector_type": "dspark", "emb_dim": 8}, "emb_dim of a DSpark drafter must be left out"),
        ({"max_steps": -7}, "max_steps must be at least 1, or -1 for num_train_epochs, got -7"),
        ({"num_train_epochs": -1}, "num_train_epochs must be above 0, got -1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha must be left out: it has no use here, got 5.0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1.0"),
        ({"seed": 2**70}, "seed must be in [0, 4294967295], got 1180591620717411303424"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
    ],
)
def test_bad_recipes(change, message, recipe, train, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder.jsonl").mkdir()
    Path("beyond.jsonl").write_text('{"input_ids": [4, 64, 5]}\n')
    assert train(recipe | change) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("word", ["true", "True"])
def test_resume_from_checkpoint_true_is_the_newest_one(word, recipe, train, tmp_path, caplog, capsys):
    flag = f"--resume-from-checkpoint={word}"
    assert train(recipe | {"eval_file": None}, flag) == 2
    said = capsys.readouterr().err
    assert (
        f"resume_from_checkpoint must be a folder of a checkpoint, or true, got '{word}'. {tmp_path / 'run'} has"
        in said
    )
    assert "training continues" not in caplog.text
    assert train(recipe | {"eval_file": None}, "--max-steps=2") == 0
    assert train(recipe | {"eval_file": None}, flag) == 0
    assert f"training continues from {tmp_path / 'run'}/checkpoint-2." in caplog.text
    state = json.loads((tmp_path / "run/trainer_state.json").read_text())
    assert state["global_step"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"resume_from_checkpoint": "./none"}, "resume_from_checkpoint must be a folder of a checkpoint, or true, got"),
        ({"report_to": "wandb"}, "report_to must be a package that is installed, or none, got 'wandb'. Install wandb"),
    ],
)
def test_what_would_fail_after_the_text_is_read_is_said_before(change, message, recipe, train, capsys, monkeypatch):
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    monkeypatch.setattr("hf_domino.training.run.make_trainer", lambda *_: pytest.fail("work has begun"))
    assert train(recipe | change) == 2
    assert message in capsys.readouterr().err


def test_the_traceback_of_an_unexpected_error_is_in_the_folder_until_a_run_ends(recipe, train, tmp_path, monkeypatch):
    def breaks(self, *args, **kwargs):
        raise ValueError("something of a library")

    with monkeypatch.context() as broken:
        broken.setattr("transformers.Trainer.train", breaks)
        with pytest.raises(ValueError, match="something of a library"):
            train(recipe | {"eval_file": None})
    written = (tmp_path / "run/error.txt").read_text()
    assert "in breaks" in written
    assert written.endswith("ValueError: something of a library\n")
    assert train(recipe | {"eval_file": None, "max_steps": 1}) == 0
    assert not (tmp_path / "run/error.txt").exists()


def test_help_shows_which_flags_take_true_or_false(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = set(re.findall(r"^  (--[\w-]+) \[true\|false\]", capsys.readouterr().out, re.MULTILINE))
    assert {"--shift-label", "--start-from-target", "--layer-fusion", "--overwrite", "--use-peft", "--bf16"} <= shown
    for flag in shown:
        assert getattr(parse(["train", flag, "false"]), flag.removeprefix("--").replace("-", "_")) is False
