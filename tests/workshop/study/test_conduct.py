"""A study from its file to its rows, on tiny models; processes are run in this one but for the slow test."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import commands
from hf_domino import DominoDraftModel
from hf_domino.cli import main as cli
from hf_domino.data import load_rows
from hf_domino.training import run as training
from hf_domino.training.hidden_states.folder import StateSettings
from recipes import study_prompts
from study import conduct, run, texts
from study.plan import Variant, load_study
from study.rows import read_rows

STUDY = """
base:
  {num_hidden_layers: 1, block_size: 4, projector_type: domino, gru_hidden_dim: 8, emb_dim: 8, shift_label: true,
   max_length: 64, num_anchors: 4, learning_rate: 1.0e-2, per_device_train_batch_size: 2, use_cpu: true}
budgets: {tiny: {steps: 4, texts: 3}, again: {steps: 4, texts: 3, rows: 4}}
variants:
  domino: {question: The base}
  dflash: {question: The twin, projector_type: dflash}
  head_only: {question: A frozen backbone, backbone_of: dflash, lambda_base_decay_ratio: 0.0}
  sampled_text: {question: Sampled text, text: sampled}
  longer: {question: Each text twice, effort: 2.0}
  other_layer: {question: Other states, target_layer_ids: [0]}
"""


@pytest.fixture
def study(tmp_path, saved_pair):
    """The command with this study, on rows of a tiny target; flags are added to it."""
    (tmp_path / "study.yaml").write_text(STUDY)
    # All characters of the tiny vocabulary, each row another one's.
    lines = [{"text": "abcdefghijklmnopqrstuvwxyzABCDEF"[i:] + "xyz" * (i + 1)} for i in range(9)]
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        f"--study={tmp_path / 'study.yaml'}", f"--target={saved_pair[0]}", f"--train-file={tmp_path / 'train.jsonl'}",
        f"--eval-file={tmp_path / 'eval.jsonl'}", f"--work={tmp_path / 'work'}", f"--rows={tmp_path / 'rows.jsonl'}",
        "--budget=tiny", "--prompt-length=8", "--max-new-tokens=24",
    ]  # fmt: skip
    return lambda *more: commands.main(["study", *flags, *more])


@pytest.fixture
def here(monkeypatch):
    """Commands are run in this process; their names are noted."""
    ran = []

    def run_all(commands, processes, threads, finished=lambda name: None):
        for command in commands:
            ran.append(command.name)
            monkeypatch.setattr(sys, "argv", command.arguments[2:])
            assert not {texts.__name__: texts.main, run.__name__: run.main}[command.arguments[2]]()
            finished(command.name)
        return {}

    monkeypatch.setattr(conduct, "run_all", run_all)
    return ran


def test_a_study_leaves_a_row_a_run_and_goes_on_where_it_was(study, here, tmp_path, capsys):
    assert study("--only", "domino", "head_only") == 0
    assert here == ["text, greedy", "text, sampled", "text, evaluation", "domino-0", "dflash-0", "head_only-0"]
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["variant"] for row in rows] == ["domino", "head_only"]  # the twin was trained for its backbone only
    head = rows[1]
    assert StateSettings.load(tmp_path / "work" / "texts-8-3" / "hidden_states") is not None
    assert head["changes"] == {"lambda_base_decay_ratio": 0.0, "backbone_of": "dflash"}
    assert (head["rows"], head["steps"], head["budget"], head["num_texts"]) == (8, 4, "tiny", 3)
    assert len(head["acceptance_rate_at"]) == 4
    assert head["acceptance_length"] == pytest.approx(1 + sum(head["acceptance_rate_at"]), abs=1e-4)
    assert {"cpu_seconds", "hardware", "commit", "date", "torch"} <= head.keys()

    folder = tmp_path / "work" / "tiny"
    twin, own = (DominoDraftModel.from_pretrained(folder / name) for name in ("dflash-0", "head_only-0"))
    weights = own.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in twin.state_dict().items())
    assert own.embed_proj[2].weight.abs().max() > 0  # the head did learn

    del here[:]
    shutil.rmtree(folder / "dflash-0")  # what has a row is not asked for its weights
    assert study("--only", "domino", "head_only", "longer") == 0
    assert here == ["longer-0"]
    assert "2 of 3 runs have a row" in capsys.readouterr().out
    longer = read_rows(tmp_path / "rows.jsonl")[-1]
    assert longer["changes"] == {"effort": 2.0}
    assert longer["tokens_seen"] == 2 * rows[0]["tokens_seen"]


def test_runs_share_states_by_the_layers_they_read_and_a_budget_may_see_texts_again(study, here, tmp_path):
    assert study("--only", "domino", "other_layer", "--budget=again") == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [row["rows"] for row in rows] == [4, 4]
    folders = sorted(path for path in (tmp_path / "work" / "texts-4-3").glob("hidden_states*") if path.is_dir())
    assert len(folders) == 2
    assert StateSettings.load(folders[0]).layer_ids != StateSettings.load(folders[1]).layer_ids == (0,)


def test_states_are_named_by_what_differs_from_the_base_texts_too(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    study = load_study(tmp_path / "study.yaml")
    name = lambda **fields: conduct._states_of(study, Variant("", **fields))  # noqa: E731
    assert name() == name(effort=2.0) == name(changes={"max_length": 64, "gru_hidden_dim": 4}) == "hidden_states"
    others = name(text="sampled"), name(changes={"max_length": 32}), name(text="sampled", changes={"max_length": 32})
    assert len({name(), *others}) == 4


def test_without_the_cache_rows_are_the_same(study, here, tmp_path):
    assert study("--only", "dflash") == 0
    shutil.rmtree(tmp_path / "work" / "texts-8-3" / "hidden_states")
    assert study("--only", "dflash", "--no-cache", "--seeds", "0", f"--rows={tmp_path / 'again.jsonl'}") == 0
    assert not (tmp_path / "work" / "texts-8-3" / "hidden_states").exists()
    kept, run_again = (read_rows(tmp_path / name)[0] for name in ("rows.jsonl", "again.jsonl"))
    assert kept["acceptance_length"] == run_again["acceptance_length"]
    assert kept["corrected_loss"] == pytest.approx(run_again["corrected_loss"], rel=1e-2)  # kept in bf16


def test_texts_have_their_prompts_in_common(study, here, tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(run, "main", int)  # nothing is trained
    monkeypatch.setattr(conduct._Progress, "finished", lambda self, name: None)
    assert study("--only", "domino") == 0
    folder = tmp_path / "work" / "texts-8-3"
    kinds = ("plain", "greedy", "sampled", "mixed")
    plain, greedy, sampled, mixed = (texts.read_rows(folder / f"{kind}.jsonl") for kind in kinds)
    for rows in zip(plain, greedy, sampled, mixed, strict=True):
        assert len({tuple(row["input_ids"][:8]) for row in rows}) == 1
    assert [row["temperature"] for row in mixed] == [0.0, 0.7] * 4
    assert mixed[0] == greedy[0]
    assert mixed[1] == sampled[1]
    source = load_rows(tmp_path / "train.jsonl", tiny_tokenizer)
    assert sorted(row["input_ids"] for row in plain) == sorted(source[index]["input_ids"] for index in range(8))


def test_rows_that_are_the_targets_text_already_are_taken_as_they_are(study, here, tmp_path, tiny_tokenizer, capsys):
    assert study("--as-written", "--only", "domino") == 0
    assert here == ["domino-0"]
    (folder,) = (tmp_path / "work").glob("texts-8-3-*")
    for name, file, count in (("mixed", "train", 8), ("evaluation", "eval", 3)):
        taken, source = texts.read_rows(folder / f"{name}.jsonl"), load_rows(tmp_path / f"{file}.jsonl", tiny_tokenizer)
        assert len(taken) == count
        known = [(list(source[index]["input_ids"]), list(source[index]["loss_mask"])) for index in range(len(source))]
        assert all((row["input_ids"], row["loss_mask"]) in known for row in taken)
    (row,) = read_rows(tmp_path / "rows.jsonl")
    assert (row["num_texts"], len(row["target_weights"]) > 5) == (3, True)
    assert study("--as-written") == cli.USER_ERROR
    assert "text of sampled_text with --as-written must be mixed, got 'sampled'" in capsys.readouterr().err


def test_a_run_starts_from_its_target_where_it_says_so(study, here, tmp_path, monkeypatch):
    started, variant = [], "  warm: {question: The target's layers, start_from_target: true, draft_vocab_size: 20}\n"
    monkeypatch.setattr(training, "start_from_target", lambda drafter, *others: started.append(drafter.config))
    (tmp_path / "study.yaml").write_text(STUDY + variant)
    assert study("--as-written", "--only", "warm") == 0
    assert [config.draft_vocab_size for config in started] == [20]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--only", "gru_9"],
            "--only must be among domino, dflash, head_only, sampled_text, longer, other_layer, got 'gru_9'",
        ),
        (["--train-file", "none.jsonl"], "--train-file must be a .jsonl, .json or text file, got 'none.jsonl'"),
        (["--study", "none.yaml"], "--study must be a YAML file, got 'none.yaml'"),
        (["--budget", "default"], "--budget must be among tiny, again, got 'default'"),
        (["--target", "./none"], "--target must be a folder or a Hub name, got './none'"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(flags, message, study, capsys, tmp_path):
    assert study(*flags) == cli.USER_ERROR
    assert message in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_file_with_too_few_rows_is_refused(study, capsys, tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"text": "abcdefghijklmnop"}\n')
    assert study() == cli.USER_ERROR
    assert "eval.jsonl must be a file of at least 3 rows for this --budget, got 1." in capsys.readouterr().err


@pytest.mark.slow
def test_runs_are_processes_and_their_failures_are_reported(study, tmp_path, capsys):
    assert study("--only", "domino") == 0
    (tmp_path / "study.yaml").write_text(STUDY.replace("text: sampled", "emb_dim: -1"))
    assert study("--only", "sampled_text", "dflash") == 1
    said = capsys.readouterr()
    assert "sampled_text-0 failed:" in said.err
    assert "emb_dim must be" in said.err
    assert [row["variant"] for row in read_rows(tmp_path / "rows.jsonl")] == ["domino", "dflash"]


def test_the_corpus_is_tokenized_by_the_target(saved_pair, tmp_path, monkeypatch):
    given = []

    def prepare(work, packages, recipe, tokenizer):
        given.append(tokenizer.get_vocab())
        for name in ("train", "held_out"):
            np.save(work / f"{name}.npy", np.arange(20000, dtype=np.uint16) % 60 + 4)

    monkeypatch.setattr(study_prompts, "prepare_corpus", prepare)
    rows = study_prompts.rows_of_corpus(tmp_path, None, str(saved_pair[0]), max_new_tokens=24)
    texts.cut_prompts(texts.Source(str(saved_pair[0]), rows, 24), tmp_path / "texts", num_rows=2, num_texts=1)
    assert given == [AutoTokenizer.from_pretrained(saved_pair[0]).get_vocab()]
