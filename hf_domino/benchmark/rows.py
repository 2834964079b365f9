"""The file of measured rows, JSONL: written a batch at a time, read back by tables and figures, taken up again.

A row is one prompt, or one batch of them, under one method and one mode, with where and how it was measured. A row
with `skipped` says instead why a method was not measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino.benchmark.provenance import DATED

Row = dict[str, Any]
Batch = tuple[str, int]  # mode, number


def read_rows(path: Path) -> list[Row]:
    """Read measured rows from a JSONL file.

    Raises:
        ValueError: If there is none, or a line is not a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"rows must be a JSONL file, got {str(path)!r}: measure with `hf-domino bench --rows {path}`.")
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [_row(line) for line in lines]
    if None in rows:
        raise ValueError(
            f"{path}, line {rows.index(None) + 1}: expected a JSON object. A run that was broken off goes on with "
            "--resume."
        )
    return [row for row in rows if row is not None]


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def measured(rows: Iterable[Row]) -> list[Row]:
    """The rows that were measured."""
    return [row for row in rows if "skipped" not in row]


class RowsFile:
    """Rows of one run on disk.

    Args:
        path (`Path`): The file.
        origin (`Mapping`): Fields of every row: where and how the run measures.
    """

    def __init__(self, path: Path, origin: Mapping[str, Any]):
        self.path, self.origin = path, dict(origin)

    def start(self, skipped: Mapping[str, str], kept: Sequence[Row] = ()) -> None:
        """Write a new file, in place of the one there is.

        Args:
            skipped (`Mapping`): Method to why it is not measured.
            kept (`Sequence[Row]`): Rows to go on from.
        """
        rows = [{"method": method, "skipped": reason} | self.origin for method, reason in skipped.items()]
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(_lines([*rows, *kept]), encoding="utf-8")
        os.replace(draft, self.path)

    def append(self, rows: Iterable[Row]) -> None:
        """Add the rows of one batch."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_lines(row | self.origin for row in rows))

    def resumable(
        self, methods: Iterable[str], batches: Mapping[Batch, Sequence[Any]], temperature: float
    ) -> list[Row]:
        """The rows of batches that an earlier run has finished.

        Args:
            methods (`Iterable[str]`): What this run measures.
            batches (`Mapping`): Mode and number of every batch of this run, with its `sources`.
            temperature (`float`): Of the sampled half.

        Raises:
            ValueError: If the earlier run was measured elsewhere or otherwise.
        """
        if not self.path.is_file():
            return []
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [_row(line) for line in lines]
        if rows and rows[-1] is None:  # broken off while writing
            rows.pop()
        found: dict[Batch, list[Row]] = {}
        for row in rows if None not in rows else read_rows(self.path):
            if row is not None and "skipped" not in row:
                found.setdefault((row["mode"], row["prompt"]), []).append(row)
        names = set(methods)
        kept = []
        for number, (batch, group) in enumerate(found.items(), start=1):
            for row in group:
                self._check(row, batches.get(batch), temperature)
            if {row["method"] for row in group} == names:
                kept += group
            elif number < len(found) or {row["method"] for row in group} - names:
                self._refuse("methods", sorted(row["method"] for row in group), sorted(names))
        return kept

    def _check(self, row: Row, sources: Sequence[Any] | None, temperature: float) -> None:
        for name, value in self.origin.items():
            if name not in DATED and row.get(name) != value:
                self._refuse(name, row.get(name), value)
        if row["sources"] != sources:
            self._refuse(f"prompts of {row['mode']} batch {row['prompt']}", row["sources"], sources)
        if row["mode"] == "sample" and row["temperature"] != temperature:
            self._refuse("temperature", row["temperature"], temperature)

    def _refuse(self, what: str, there: Any, here: Any) -> None:
        raise ValueError(
            f"--resume needs the {what} that {self.path} was measured with, {there!r}, got {here!r}: "
            "write to another --rows, or start over with --overwrite."
        )


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
