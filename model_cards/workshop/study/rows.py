"""The file of a study, JSONL: one row a run, marked by its budget."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import write_whole
from study.plan import Run

Row = dict[str, Any]
NEEDED = ("variant", "seed", "budget", "acceptance_length")
OWN = ("variant", "seed", "changes")  # what differs from run to run
OTHER_FILE = "Write to another --rows, or delete the rows of this budget."


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a study.

    Raises:
        ValueError: If there is none, or a line is not a row of a study.
    """
    if not path.is_file():
        raise refusal(
            "--rows",
            "a JSONL file",
            str(path),
            "There is none of that name: study makes one.",
        )
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = _row(line)
        if row is None:
            raise ValueError(f"{path}, line {number}: expected a JSON object with {', '.join(NEEDED)}.")
        rows.append(row)
    return rows


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and set(NEEDED) <= row.keys() else None


def of_budget(rows: Sequence[Row], name: str | None = None) -> list[Row]:
    """The rows of one budget, by default the one with the most: rows of different budgets are never compared.

    Raises:
        ValueError: If it has no rows.
    """
    counts = Counter(row["budget"] for row in rows)
    name = name or next((found for found, _ in counts.most_common(1)), None)
    if name not in counts:
        raise refusal("--budget", f"one with rows ({', '.join(counts) or 'there are none'})", name, "Run it first.")
    return [row for row in rows if row["budget"] == name]


def finished(rows: Sequence[Row], wanted: Mapping[Run, Row]) -> set[Run]:
    """Which runs have a row.

    Args:
        rows (`Sequence[Row]`): Rows that are there.
        wanted (`Mapping`): Run to what its row would begin with: variant, seed, budget, and all that makes runs equal.

    Raises:
        ValueError: If a row of the same budget was made with other data or fields.
    """
    known = {(row["variant"], row["seed"], row["budget"]): row for row in rows}
    any_of = {row["budget"]: row for row in rows}
    done = set()
    for run, start in wanted.items():
        row = known.get((run.variant, run.seed, start["budget"]))
        if row is not None:
            done.add(run)
        other = row or any_of.get(start["budget"])
        if other is not None:
            _check(run, start, other, whole=row is not None)
    return done


def _check(run: Run, start: Row, row: Row, whole: bool) -> None:
    """Compare with the row of the same run, or with any other of the budget, whose own fields may differ."""
    for name, value in start.items():
        if row.get(name) != value and (whole or name not in OWN):
            expected = f"{row.get(name)!r}, as in the rows of budget {start['budget']}"
            raise refusal(f"{name} of {run.name}", expected, value, OTHER_FILE)


def append(path: Path, row: Row) -> None:
    """Add a row: the file has it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_whole(path, before + json.dumps(row) + "\n")
