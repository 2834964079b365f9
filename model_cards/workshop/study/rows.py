"""The results of a study, one for each run: its variant is the method, and its budget is among the settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino.evaluation.results import Result
from hf_domino.targets.identity import difference
from study.plan import Run

OWN = ("seed", "changes")  # settings that differ from run to run
WEIGHTS = "target_weights"  # the digest of the target's


def of_budget(rows: Sequence[Result], name: str | None = None) -> list[Result]:
    """The rows of one budget, by default the one with the most: rows of different budgets are never compared."""
    counts = Counter(row["budget"] for row in rows)
    name = name or next((found for found, _ in counts.most_common(1)), None)
    if name not in counts:
        raise invalid_argument(
            "--budget", f"one with rows ({', '.join(counts) or 'there are none'})", name, "Run it first."
        )
    return [row for row in rows if row["budget"] == name]


def finished(rows: Sequence[Result], wanted: Mapping[Run, Mapping[str, Any]]) -> set[Run]:
    """Which runs have a result; `wanted`: run to its settings, which but for `OWN` are equal for all of a budget."""
    known = {(row.method, row["seed"], row["budget"]): row for row in rows}
    any_of = {row["budget"]: row for row in rows}
    done = set()
    for run, settings in wanted.items():
        row = known.get((run.variant, run.seed, settings["budget"]))
        if row is not None:
            done.add(run)
        other = row or any_of.get(settings["budget"])
        for name, value in settings.items():
            if other is None or (row is None and name in OWN):
                continue
            before = other.get(name)
            is_same = before == value
            if name == WEIGHTS and before is not None:  # older rows have a shorter digest
                is_same = difference("weights_digest", before, value) is None
            if not is_same:
                expected = f"{before!r}, as in the rows of budget {settings['budget']}"
                remedy = "Write to another --results, or delete the rows of this budget."
                raise invalid_argument(f"{name} of {run.name}", expected, value, remedy)
    return done
