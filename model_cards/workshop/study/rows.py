"""The file of a study, JSONL: one row a run, marked by its budget."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino._common.errors import invalid_argument
from study.plan import Run

Row = dict[str, Any]
OWN = ("variant", "seed", "changes")  # what differs from run to run


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a study."""
    if not path.is_file():
        raise invalid_argument("--results", "a JSONL file", str(path), "There is none of that name: study makes one.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_budget(rows: Sequence[Row], name: str | None = None) -> list[Row]:
    """The rows of one budget, by default the one with the most: rows of different budgets are never compared."""
    counts = Counter(row["budget"] for row in rows)
    name = name or next((found for found, _ in counts.most_common(1)), None)
    if name not in counts:
        raise invalid_argument(
            "--budget", f"one with rows ({', '.join(counts) or 'there are none'})", name, "Run it first."
        )
    return [row for row in rows if row["budget"] == name]


def finished(rows: Sequence[Row], wanted: Mapping[Run, Row]) -> set[Run]:
    """Which runs have a row; `wanted`: run to what its row would begin with, all that makes runs of a budget equal."""
    known = {(row["variant"], row["seed"], row["budget"]): row for row in rows}
    any_of = {row["budget"]: row for row in rows}
    done = set()
    for run, start in wanted.items():
        row = known.get((run.variant, run.seed, start["budget"]))
        if row is not None:
            done.add(run)
        other = row or any_of.get(start["budget"], start)
        for name, value in start.items():
            if other.get(name) != value and (row is not None or name not in OWN):
                expected = f"{other.get(name)!r}, as in the rows of budget {start['budget']}"
                remedy = "Write to another --results, or delete the rows of this budget."
                raise invalid_argument(f"{name} of {run.name}", expected, value, remedy)
    return done
