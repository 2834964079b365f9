"""The file of rows: what a run that was broken off has finished, and which run may not go on."""

from __future__ import annotations

import pytest

from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.evaluation.benchmark.rows import finished
from hf_domino.evaluation.results import Result, append_results, read_results, to_lines

MODELS = {
    "target": {"name": "t", "config_digest": "c0-d0", "weights_digest": "aa-00ff"},
    "drafter d (Domino)": {"name": "d", "config_digest": "c1-d1", "weights_digest": "bb-1234"},
}
SETTINGS = {"methods": ["plain", "domino"], "repeats": 3, "models": MODELS}
OF_ANOTHER = MODELS["drafter d (Domino)"]
PROVENANCE = {"commit": "abc", "date": "2026-01-01"}
BATCHES = {(mode, index): [{"text": f"text {index}"}] for mode in ("greedy", "sample") for index in range(3)}
DONE = [("greedy", 0), ("greedy", 1), ("sample", 0)]


def batch(mode, index):
    sources = [source(prompt) for prompt in BATCHES[mode, index]]
    about = {"mode": mode, "prompt": index, "sources": sources, "temperature": 0.0 if mode == "greedy" else 0.7}
    return [Result(method, SETTINGS | about, {}, PROVENANCE) for method in SETTINGS["methods"]]


@pytest.fixture
def path(tmp_path):
    """Rows of a run that was broken off after three of its six batches."""
    skipped = Result("dflash", SETTINGS, {"skipped": "there is no DFlash baseline"}, PROVENANCE)
    path = tmp_path / "rows.jsonl"
    path.write_text(to_lines([skipped, *(row for done in DONE for row in batch(*done))]))
    return path


def of(path, settings=(), provenance=(), batches=BATCHES, temperature=0.7):
    rows = finished(path, SETTINGS | dict(settings), PROVENANCE | dict(provenance), batches, temperature)
    return [(row["mode"], row["prompt"]) for row in rows[::2]]


def test_finished_batches_are_kept_on_another_day_too(path):
    assert of(path, provenance={"date": "2026-01-02"}) == DONE
    assert of(path, {"target_commit": None}) == DONE  # of a folder, before commits were told
    assert finished(path.with_name("none.jsonl"), SETTINGS, PROVENANCE, BATCHES, 0.7) == []


def test_a_batch_broken_off_while_writing_is_measured_again(path):
    path.write_text(path.read_text()[:-20])
    assert of(path) == DONE[:2]
    with pytest.raises(ValueError, match=r"line 7: .*finished by its own command"):
        read_results(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]))
    with pytest.raises(ValueError, match="line 2"):
        of(path)
    path.write_text('{"text": "a file of prompts"}')
    with pytest.raises(ValueError, match="line 1: expected a JSON object with method, settings"):
        of(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provenance": {"commit": "def"}}, "commit must be as in .*, 'abc', got 'def'"),
        ({"settings": {"drafter_commit": "def"}}, "drafter_commit .* None, got 'def'"),
        ({"settings": {"repeats": 1}}, "repeats .* 3, got 1. Write to another --results, or give --overwrite"),
        ({"settings": {"methods": ["plain", "recycling"]}}, "methods must be"),
        (
            {"settings": {"models": MODELS | {"drafter d (Domino)": OF_ANOTHER | {"weights_digest": "cc-1234"}}}},
            r"the drafter d \(Domino\)'s weights_digest must be 'bb' \(that of d, with which .* was made\), got 'cc'",
        ),
        (
            {"settings": {"models": MODELS | {"drafter d (Domino)": OF_ANOTHER | {"config_digest": "c1-d2"}}}},
            r"the drafter d \(Domino\)'s config_digest must be 'd1'",
        ),
        (
            {"settings": {"models": MODELS | {"target": MODELS["target"] | {"weights_digest": "aa-10ff"}}}},
            "the target's weights_digest must be '00ff'",
        ),
        (
            {"settings": {"models": {"target": MODELS["target"]}}},
            r"models must be those with which .*, \['target', 'drafter d \(Domino\)'\], got \['target'\]",
        ),
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
        read_results(tmp_path / "none.jsonl")


def test_figures_are_written_with_six_digits():
    figures = {"seconds": 1 / 3, "each": [2 / 3, (1e-9, "ab")], "of": {"x": 123456789.0}, "n": 1234567, "none": None}
    written = {"seconds": 0.333333, "each": [0.666667, [1e-9, "ab"]], "of": {"x": 123457000.0}, "n": 1234567}
    assert Result.from_line(Result("plain", figures=figures).to_line()).figures == written | {"none": None}


def test_a_result_finds_every_part_by_its_name_and_is_read_as_it_was_written(tmp_path):
    result = Result("plain", {"seed": 0}, {"seconds": 2.5}, {"date": "2026-11-29"})
    assert dict(result) == {"method": "plain", "seed": 0, "seconds": 2.5, "date": "2026-11-29"}
    assert len(result) == 4
    with pytest.raises(KeyError):
        result["load"]
    assert (result | {"load": 1.0})["load"] == 1.0
    assert "load" not in result
    path = tmp_path / "new" / "results.jsonl"
    append_results(path, [result])
    append_results(path, [result | {"seconds": 3.0}])
    assert read_results(path) == [result, result | {"seconds": 3.0}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"version":1', '"version":2'), "line 1: expected version 1, got 2"),
        (('"version":1', '"seconds":1'), "line 1: expected a JSON object with method, settings, figures, provenance"),
    ],
)
def test_results_of_another_version_are_refused(change, message, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(Result("plain").to_line().replace(*change))
    with pytest.raises(ValueError, match=message):
        read_results(path, mend=True)
