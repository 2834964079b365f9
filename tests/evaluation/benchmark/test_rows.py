from __future__ import annotations

import json

import pytest

from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.evaluation.benchmark.rows import RowsFile, read_rows

ORIGIN = {"methods": ["plain", "domino"], "commit": "abc", "repeats": 3, "date": "2026-01-01"}
BATCHES = {(mode, index): [{"text": f"text {index}"}] for mode in ("greedy", "sample") for index in range(3)}


def batch(mode, index):
    sources = [source(prompt) for prompt in BATCHES[mode, index]]
    about = {"mode": mode, "prompt": index, "sources": sources, "temperature": 0.0 if mode == "greedy" else 0.7}
    return [{"method": method} | about for method in ORIGIN["methods"]]


@pytest.fixture
def file(tmp_path):
    """A run that was broken off after three of its six batches."""
    file = RowsFile(tmp_path / "rows.jsonl", ORIGIN)
    file.start({"dflash": "there is no DFlash twin"})
    for mode, index in (("greedy", 0), ("greedy", 1), ("sample", 0)):
        file.append(batch(mode, index))
    return file


def finished(file, origin=(), batches=BATCHES, temperature=0.7):
    return RowsFile(file.path, ORIGIN | dict(origin)).finished(batches, temperature)


def test_rows_carry_the_origin(file):
    rows = read_rows(file.path)
    assert rows[0] == {"method": "dflash", "skipped": "there is no DFlash twin"} | ORIGIN
    assert len(rows) == 7
    assert all(row.items() >= ORIGIN.items() for row in rows)


def test_finished_batches_are_kept(file):
    kept = finished(file, {"date": "2026-01-02"})
    assert [(row["mode"], row["prompt"]) for row in kept[::2]] == [("greedy", 0), ("greedy", 1), ("sample", 0)]
    file.start({}, kept)
    assert read_rows(file.path) == kept


def test_rows_from_before_commits_were_told_go_on_with_folders(file):
    assert len(finished(file, {"target_commit": None, "drafter_commit": None})) == 6


def test_a_batch_broken_off_while_writing_is_measured_again(file):
    file.path.write_text(file.path.read_text()[:-20])
    assert [(row["mode"], row["prompt"]) for row in finished(file)[::2]] == [("greedy", 0), ("greedy", 1)]
    with pytest.raises(ValueError, match=r"line 7: expected a JSON object.*--resume"):
        read_rows(file.path)


def test_a_line_broken_elsewhere_is_an_error(file):
    lines = file.path.read_text().splitlines()
    file.path.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]))
    with pytest.raises(ValueError, match="line 2"):
        finished(file)


def test_no_file_is_a_run_not_begun(tmp_path):
    assert RowsFile(tmp_path / "none.jsonl", ORIGIN).finished(BATCHES, 0.7) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"origin": {"commit": "def"}}, "the commit that .* was measured with, 'abc', got 'def'"),
        ({"origin": {"drafter_commit": "def"}}, "the drafter_commit that .* was measured with, None, got 'def'"),
        ({"origin": {"repeats": 1}}, "the repeats that .* 3, got 1: write to another --rows, or .* --overwrite"),
        ({"origin": {"methods": ["plain", "lean"]}}, "the methods that"),
        ({"temperature": 1.0}, "the temperature that .* 0.7, got 1.0"),
        ({"batches": BATCHES | {("greedy", 1): [{"text": "other"}]}}, "the prompts of greedy batch 1 that"),
        ({"batches": {key: value for key, value in BATCHES.items() if key[0] == "greedy"}}, "sample batch 0"),
    ],
)
def test_a_run_measured_otherwise_is_refused(file, changes, message):
    with pytest.raises(ValueError, match=message):
        finished(file, **changes)


def test_rows_that_are_not_there_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"rows must be a JSONL file, got '.*none.jsonl': measure with `hf-domino bench"
    ):
        read_rows(tmp_path / "none.jsonl")


def test_rows_are_json_lines(file):
    assert all(isinstance(json.loads(line), dict) for line in file.path.read_text().splitlines())
