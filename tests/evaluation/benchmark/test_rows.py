"""The file of rows: what a run that was broken off has finished, and which run may not go on."""

from __future__ import annotations

import json

import pytest

from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.evaluation.benchmark.rows import finished, read_rows, to_lines

ORIGIN = {"methods": ["plain", "domino"], "commit": "abc", "repeats": 3, "date": "2026-01-01"}
BATCHES = {(mode, index): [{"text": f"text {index}"}] for mode in ("greedy", "sample") for index in range(3)}
DONE = [("greedy", 0), ("greedy", 1), ("sample", 0)]


def batch(mode, index):
    sources = [source(prompt) for prompt in BATCHES[mode, index]]
    about = {"mode": mode, "prompt": index, "sources": sources, "temperature": 0.0 if mode == "greedy" else 0.7}
    return [{"method": method} | about | ORIGIN for method in ORIGIN["methods"]]


@pytest.fixture
def path(tmp_path):
    """Rows of a run that was broken off after three of its six batches."""
    skipped = {"method": "dflash", "skipped": "there is no DFlash baseline"} | ORIGIN
    path = tmp_path / "rows.jsonl"
    path.write_text(to_lines([skipped, *(row for done in DONE for row in batch(*done))]))
    return path


def of(path, origin=(), batches=BATCHES, temperature=0.7):
    rows = finished(path, ORIGIN | dict(origin), batches, temperature)
    return [(row["mode"], row["prompt"]) for row in rows[::2]]


def test_finished_batches_are_kept_on_another_day_too(path):
    assert of(path, {"date": "2026-01-02"}) == DONE
    assert of(path, {"target_commit": None}) == DONE  # of a folder, before commits were told
    assert finished(path.with_name("none.jsonl"), ORIGIN, BATCHES, 0.7) == []


def test_a_batch_broken_off_while_writing_is_measured_again(path):
    path.write_text(path.read_text()[:-20])
    assert of(path) == DONE[:2]
    with pytest.raises(ValueError, match=r"line 7: expected a JSON object.*by its own command"):
        read_rows(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]))
    with pytest.raises(ValueError, match="line 2"):
        of(path)
    path.write_text('{"text": "a file of prompts"}')
    with pytest.raises(ValueError, match="line 1: expected a JSON object with a method"):
        of(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"origin": {"commit": "def"}}, "commit must be as in .*, 'abc', got 'def'"),
        ({"origin": {"drafter_commit": "def"}}, "drafter_commit .* None, got 'def'"),
        ({"origin": {"repeats": 1}}, "repeats .* 3, got 1. Write to another --results, or give --overwrite"),
        ({"origin": {"methods": ["plain", "recycling"]}}, "methods must be"),
        ({"temperature": 1.0}, "temperature .* 0.7, got 1.0"),
        ({"batches": BATCHES | {("greedy", 1): [{"text": "other"}]}}, "sources of greedy batch 1"),
        ({"batches": {key: value for key, value in BATCHES.items() if key[0] == "greedy"}}, "sample batch 0"),
    ],
)
def test_a_run_measured_otherwise_is_refused(path, changes, message):
    with pytest.raises(ValueError, match=message):
        of(path, **changes)


def test_rows_that_are_not_there_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"results must be a JSONL file, got '.*none.jsonl'. Measure with `hf-domino"):
        read_rows(tmp_path / "none.jsonl")


def test_figures_are_written_with_six_digits():
    row = {"seconds": 1 / 3, "each": [2 / 3, (1e-9, "ab")], "of": {"x": 123456789.0}, "n": 1234567, "none": None}
    written = {"seconds": 0.333333, "each": [0.666667, [1e-9, "ab"]], "of": {"x": 123457000.0}, "n": 1234567}
    assert json.loads(to_lines([row])) == written | {"none": None}
