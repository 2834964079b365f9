"""A study from its file to its rows, and from rows to what is said of them."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser

import commands
from figures import write_figures
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.cli import main as cli
from hf_domino.evaluation.results import Result, read_results, to_lines
from hf_domino.pair import find_pair
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments
from recipes.smollm2 import RECIPE
from study import run, texts
from study.figures import BETTER, SAME, WORSE, colour_of, make_figures, name_marks
from study.page import results
from study.plan import STUDY_FILE, Run, load_study
from study.rows import finished, of_budget
from study.summary import pooled_scatter, summarize

STUDY = """
base:
  {num_hidden_layers: 1, block_size: 4, projector_type: domino, gru_hidden_dim: 8, emb_dim: 8, shift_label: true,
   max_length: 64, num_anchors: 4, learning_rate: 1.0e-2, per_device_train_batch_size: 2, use_cpu: true,
   target_dtype: float32}
budgets: {tiny: {steps: 4, texts: 3}, again: {steps: 4, texts: 3, rows: 4}}
variants:
  domino: {question: The base, seeds: 3}
  dflash: {question: The baseline, seeds: 3, projector_type: dflash}
  head_only: {question: A frozen backbone, seeds: 3, against: dflash, backbone_of: dflash, lambda_base_decay_ratio: 0.0}
  layers_1: {question: One layer, num_hidden_layers: 2}
  greedy_text: {question: Greedy text, text: greedy}
  broken: {question: No drafter, emb_dim: -1}
"""
SETTINGS = {
    "budget": "tiny", "changes": {}, "steps": 2, "base": {"per_device_train_batch_size": 8, "num_anchors": 24},
    "target": "tiny",
}  # fmt: skip
FIGURES = {
    "num_rounds": 100, "num_texts": 3, "base_loss": 2.5, "corrected_loss": 2.0, "parameters": 2_500_000,
    "seconds": 60.0, "cpu_seconds": 59.0,
}  # fmt: skip
PROVENANCE = {
    "hardware": "a CPU", "threads": 1, "torch": "2", "transformers": "5", "commit": "0123456789abcdef",
    "date": "2026-01-01",
}  # fmt: skip
LENGTHS = {"domino": (3.0, 3.1, 3.2), "dflash": (2.5, 2.6, 2.4), "head_only": (2.6, 2.5, 2.55)}


def row(variant, seed, length, budget="tiny", **figures):
    rates = [round((length - 1) * share, 6) for share in (0.5, 0.3, 0.2)]
    found = FIGURES | {"acceptance_length": length, "acceptance_rate_at": rates} | figures
    return Result(variant, SETTINGS | {"seed": seed, "budget": budget}, found, PROVENANCE)


ROWS = [row(name, seed, length) for name, lengths in LENGTHS.items() for seed, length in enumerate(lengths)]
ROWS += [row("layers_1", 0, 2.2, parameters=1_900_000), row("greedy_text", 0, 3.04)]


@pytest.fixture
def study_file(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


@pytest.fixture
def command(study_file, tmp_path, saved_pair, monkeypatch):
    """The command on rows of a tiny target; runs are made in this process."""

    def here(arguments, log):
        try:
            run.main(Path(arguments[1]))
        except Exception as error:
            log.write_text(str(error))
            return 1
        return 0

    monkeypatch.setattr(run, "in_a_process", here)
    lines = [{"text": "abcdefghijklmnopqrstuvwxyzABCDEF"[i:] + "xyz" * (i + 1)} for i in range(9)]
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        f"--study={study_file}", f"--target={saved_pair[0]}", f"--train-file={tmp_path / 'train.jsonl'}",
        f"--eval-file={tmp_path / 'eval.jsonl'}", f"--work={tmp_path / 'work'}", f"--results={tmp_path / 'rows.jsonl'}",
        "--budget=tiny", "--processes=1",
    ]  # fmt: skip
    return lambda *more: commands.main(["study", *flags, *more])


def test_a_study_leaves_a_row_a_run_and_goes_on_where_it_was(command, tmp_path, capsys):
    assert command("--only", "head_only", "broken", "--seeds", "0") == 1
    said = capsys.readouterr()
    assert "broken-0 failed:\nemb_dim" in said.err
    (head,) = read_results(tmp_path / "rows.jsonl")  # the baseline was trained for its backbone only
    assert head["changes"] == {"lambda_base_decay_ratio": 0.0, "backbone_of": "dflash"}
    assert (head["rows"], head["steps"], head["budget"], head["num_texts"]) == (8, 4, "tiny", 3)
    assert head["acceptance_length"] == pytest.approx(1 + sum(head["acceptance_rate_at"]), abs=1e-4)
    assert {"tokens_seen", "base_loss", "corrected_loss", "cpu_seconds", "hardware", "commit", "date"} <= head.keys()
    folder = tmp_path / "work" / "tiny"
    baseline, own = (DominoDraftModel.from_pretrained(folder / name) for name in ("dflash-0", "head_only-0"))
    weights = own.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in baseline.state_dict().items())
    assert own.embed_proj[2].weight.abs().max() > 0  # the head did learn
    assert command("--only", "head_only", "domino", "--seeds", "0") == 0
    assert "1 of 2 runs have a row" in capsys.readouterr().out
    assert [found.method for found in read_results(tmp_path / "rows.jsonl")] == ["head_only", "domino"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "gru_9"], "--only must be among domino, dflash"),
        (["--train-file", "none.jsonl"], "--train-file must be a file of rows"),
        (["--study", "none.yaml"], "--study must be a YAML file, got 'none.yaml'"),
        (["--budget", "default"], "--budget must be among tiny, again, got 'default'"),
        (["--only", "greedy_text"], "text of greedy_text with --train-file must be 'mixed'"),
    ],
)
def test_what_is_wrong_is_said_before_any_work(flags, message, command, capsys, tmp_path):
    assert command(*flags) == cli.USER_ERROR
    assert message.replace("'mixed'", "mixed") in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_the_targets_texts_have_their_prompts_in_common(saved_pair, tmp_path, monkeypatch):
    def prepare(work, packages, recipe, tokenizer):
        for name in ("train", "held_out"):
            np.save(work / f"{name}.npy", np.arange(20000, dtype=np.uint16) % 60 + 4)

    monkeypatch.setattr(texts, "prepare_corpus", prepare)
    folder = texts.text_of_corpus(tmp_path, None, str(saved_pair[0]), num_rows=4, num_texts=2, tokens=8)
    plain, greedy, sampled, mixed, _ = (
        texts.read_rows(folder / f"{name}.jsonl") for name in ("plain", "greedy", "sampled", "mixed", "evaluation")
    )
    for rows in zip(plain, greedy, sampled, mixed, strict=True):
        assert len({tuple(one["input_ids"][: plain[0]["prompt_length"]]) for one in rows}) == 1
    assert [one["temperature"] for one in mixed] == [0.0, 0.7] * 2
    assert len(texts.digest_of(folder)) == 16


def test_rows_of_other_data_or_fields_are_not_added_to():
    start = {"seed": 0, "budget": "small", "changes": {}, "texts_digest": "a"}
    known = [Result("domino", start)]
    other = Run("domino", 1)
    assert finished(known, {Run("domino", 0): start, other: start | {"seed": 1}}) == {Run("domino", 0)}
    for run_, changes in ((Run("domino", 0), {"changes": {"emb_dim": 8}}), (other, {"seed": 1, "texts_digest": "b"})):
        with pytest.raises(ValueError, match=f"{[*changes][-1]} of {run_.name} must be"):
            finished(known, {run_: start | changes})


def test_budgets_are_kept_apart():
    rows = [*ROWS, row("domino", 0, 9.0, budget="large")]
    assert of_budget(rows) == ROWS  # the one with the most rows
    assert [found["acceptance_length"] for found in of_budget(rows, "large")] == [9.0]


@pytest.mark.parametrize(
    "path",
    [
        *(STUDY_FILE.with_name(f"{name}.yaml") for name in ("study", "kinds", "adapter")),
        RECIPE.with_name("smollm2_study.yaml"),
    ],
)
def test_every_variant_of_ours_is_a_training_of_the_bundled_target(path, tmp_path):
    study, folder = load_study(path), find_pair()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    groups = ModelArguments, DrafterArguments, DataArguments, DominoTrainingArguments
    for name, variant in study.variants.items():
        fields = run.LEFT_OUT | study.base | variant.changes | run.ALWAYS | {"output_dir": str(tmp_path)}
        _, shape, _, args = HfArgumentParser(groups).parse_dict(fields)  # refuses a field that it does not know
        assert args.walk_rows == 0
        assert variant.question
        if path == STUDY_FILE:
            DominoConfig.for_target(config, tokenizer, **shape.overrides())
            assert variant.described() or name == "domino"


def test_differences_are_measured_by_the_scatter_over_seeds(study_file):
    found = {summary.variant: summary for summary in summarize(load_study(study_file), ROWS)}
    assert list(found) == [*LENGTHS, "layers_1", "greedy_text"]
    assert found["domino"].difference is None
    baseline = found["dflash"].difference
    assert (baseline.above, baseline.seeds, baseline.is_clear) == (0, 3, True)
    assert (baseline.mean, baseline.ratio) == (pytest.approx(-0.6), pytest.approx(2.5 / 3.1))
    # Variances .01, .01 and .0025 with two degrees of freedom each; Student's t of six is 2.45.
    deviation = math.sqrt((0.01 + 0.01 + 0.0025) / 3)
    assert baseline.error == pytest.approx(2.45 * deviation * math.sqrt(2 / 3))
    assert found["layers_1"].difference.error == pytest.approx(2.45 * deviation * math.sqrt(4 / 3))
    head = found["head_only"].difference
    assert (head.against, head.above, head.is_clear) == ("dflash", 2, False)
    assert (found["domino"].low, found["domino"].high) == (3.0, 3.2)
    alone = [row("domino", 0, 3.0), row("dflash", 0, 2.0)]
    assert math.isnan(pooled_scatter(alone)[0])
    assert summarize(load_study(study_file), alone)[1].difference.error is None


def test_what_is_no_longer_in_the_package_has_rows_and_no_runs(study_file):
    study_file.write_text(STUDY + "  heads: {question: Gone, seeds: 0, projector_type: medusa}\n")
    study = load_study(study_file)
    assert "heads" not in {run_.variant for runs in (study.runs(), study.runs(["heads"], [0])) for run_ in runs}
    assert [found.variant for found in summarize(study, [*ROWS, row("heads", 0, 1.5)])][-1] == "heads"


def test_the_table_says_what_the_rows_say(study_file):
    text = results(load_study(study_file), ROWS)
    assert "`domino` has 1.24 x the acceptance length of its baseline `dflash`, above it at 3 of 3 seeds." in text
    assert "Clearly worse: `layers_1` (−0.90), `dflash` (−0.60)." in text  # noqa: RUF001
    assert "No clear difference: `greedy_text` (−0.06), `head_only` (+0.05)." in text  # noqa: RUF001
    assert "| `domino`: The base | 3.10 (3.00 to 3.20) |  |  | 2.50 | 2.00 | 2.50 M | 59 |" in text
    assert "Budget `tiny`: 11 runs of 2 steps x 8 examples x 24 anchors, for tiny." in text


def test_the_command_lists_and_draws_without_training(study_file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rows.jsonl"
    path.write_text(to_lines(ROWS))
    flags = ["study", "--study", str(study_file), "--results", str(path)]
    assert commands.main([*flags, "--list", "--budget", "tiny"]) == 0
    said = capsys.readouterr().out
    assert "budget tiny: 4 steps, 8 texts; 11 of 12 runs" in said
    assert "layers_1         x    One layer  [num_hidden_layers=2]" in said
    assert commands.main([*flags, "--figures", str(tmp_path / "drawn")]) == 0
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {"variants.svg", "positions.svg", "size.svg"}


def test_figures_follow_the_rows(study_file, tmp_path):
    pytest.importorskip("matplotlib")
    study = load_study(study_file)
    written = write_figures(make_figures(study, ROWS), tmp_path)
    words = {path.stem: " ".join(ElementTree.parse(path).getroot().itertext()) for path in written}
    assert "greedy_text" in words["variants"]
    assert "layers_1" not in words["positions"]  # several seeds only
    assert "layers_1" in words["size"]
    colours = {summary.variant: colour_of(summary) for summary in summarize(study, ROWS)}
    assert (colours["layers_1"], colours["greedy_text"]) == (WORSE, SAME)
    assert colour_of(summarize(study, [*ROWS[:9], row("layers_1", 0, 4.0)])[-1]) == BETTER
    panels = make_figures(study, [found | {"num_rounds": 40} for found in ROWS])["positions"].axes
    baseline = [next(line for line in axes.get_lines() if line.get_label() == "dflash") for axes in panels]
    assert [line.get_xdata().tolist() for line in baseline] == [[1, 2, 3], [1]]  # 120, 90 and 54 rounds


def test_names_lie_apart():
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    places = [(1.0, 1.0), (1.001, 1.0), (1.0, 1.001), (2.0, 2.0), (1.999, 2.0)]
    for place in places:
        axes.plot(*place, "o")
    name_marks(axes, [(f"variant_{index}", place, "black") for index, place in enumerate(places)])
    figure.draw_without_rendering()
    boxes = [super(type(text), text).get_window_extent() for text in axes.texts]  # less the lines that lead there
    assert len(boxes) == len(places)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(axes.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))
