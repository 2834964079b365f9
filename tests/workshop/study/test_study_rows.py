"""The file of rows: resumed, never mixed."""

from __future__ import annotations

import pytest
import study_rows

from study.plan import Run
from study.rows import append, finished, of_budget, read_rows


def test_rows_are_added_and_read_back(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    for row in study_rows.rows()[:2]:
        append(path, row)
    assert read_rows(path) == study_rows.rows()[:2]
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"variant": "domino"}'])
def test_what_is_no_row_is_named_by_its_line(line, tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, study_rows.rows()[0])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: expected a JSON object with variant, seed, budget"):
        read_rows(path)
    with pytest.raises(ValueError, match="--rows must be a JSONL file"):
        read_rows(tmp_path / "none.jsonl")


def test_budgets_are_kept_apart():
    rows = [*study_rows.rows(), study_rows.row("domino", 0, 9.0, budget="large")]
    assert of_budget(rows) == study_rows.rows()  # the one with the most rows
    assert [row["acceptance_length"] for row in of_budget(rows, "large")] == [9.0]
    with pytest.raises(ValueError, match=r"--budget must be one with rows \(small, large\), got 'huge'"):
        of_budget(rows, "huge")


def start(variant, seed, **fields):
    """What a run's row begins with."""
    return {"variant": variant, "seed": seed, "budget": "small", "changes": {}, "texts_digest": "a"} | fields


def test_what_has_a_row_is_finished():
    rows = [start("domino", 0), start("domino", 0, budget="large", texts_digest="b")]
    wanted = {Run("domino", 0): start("domino", 0), Run("domino", 1): start("domino", 1)}
    assert finished(rows, wanted) == {Run("domino", 0)}
    assert finished([], wanted) == set()


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("domino", {"changes": {"emb_dim": 8}}, "changes of domino-0 must be {}, as in the rows of budget small"),
        ("dflash", {"texts_digest": "b"}, "texts_digest of dflash-0 must be 'a'"),  # equal data, or no comparison
    ],
)
def test_rows_of_other_data_or_fields_are_not_added_to(variant, fields, message):
    with pytest.raises(ValueError, match=message):
        finished([start("domino", 0)], {Run(variant, 0): start(variant, 0, **fields)})
