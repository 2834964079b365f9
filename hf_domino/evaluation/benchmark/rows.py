"""The file of measured rows, JSONL: written a batch at a time, read back by tables and figures, taken up again.

A row is one prompt, or one batch of them, under one method and one mode, with where and how it was measured. A row
with `skipped` says instead why a method was not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_domino._common.provenance import provenance
from hf_domino._common.whole_files import write_whole
from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.pair import Pair
from hf_domino.target.identity import commit_of

Row = dict[str, Any]
Batch = tuple[str, int]  # mode, number
Prompts = Sequence[dict[str, Any]]
DATED = ("date",)  # may differ between rows of one run that was taken up again


def provenance_of_run(options: argparse.Namespace, pair: Pair, methods: Iterable[str]) -> dict[str, Any]:
    """Fields that every row of a run carries, the commits of what came from the Hub among them."""
    return {
        "methods": list(methods),
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "lookup_tokens": options.lookup_tokens,
        "assistant": options.assistant and Path(options.assistant).name,
        "early_exit": options.early_exit,
        "tree_size": options.tree_size,
        "dtype": options.dtype,
        "device": torch.device(options.device).type,
        "seed": options.seed,
        "pair": pair.name,
        "target_commit": commit_of(pair.target, options.target_revision),
        "drafter_commit": pair.drafter and commit_of(pair.drafter, options.drafter_revision),
    } | provenance(options.device)


def read_rows(path: Path, mend: bool = False) -> list[Row]:
    """Read measured rows from a JSONL file; `mend` leaves out a last line that was broken off while it was written.

    Raises:
        ValueError: If there is none, or a line is not a row.
    """
    if not path.is_file():
        raise ValueError(f"rows must be a JSONL file, got {str(path)!r}: measure with `hf-domino bench --rows {path}`.")
    rows = [_row(line) for line in path.read_bytes().splitlines() if line.strip()]
    if mend and rows and rows[-1] is None:
        rows.pop()
    if None in rows:
        raise ValueError(
            f"{path}, line {rows.index(None) + 1}: expected a JSON object with a method. A run that was broken off "
            "goes on with --resume."
        )
    return [row for row in rows if row is not None]


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # of JSON, or of text
        return None
    return row if isinstance(row, dict) and "method" in row else None


def measured(rows: Iterable[Row]) -> list[Row]:
    """The rows that were measured."""
    return [row for row in rows if "skipped" not in row]


class RowsFile:
    """Rows of one run on disk; `origin` is what every row says of where and how it was measured, and by what."""

    def __init__(self, path: Path, origin: Mapping[str, Any]):
        self.path, self.origin = path, dict(origin)

    def start(self, skipped: Mapping[str, str], kept: Sequence[Row] = ()) -> None:
        """Write a new file, in place of the one there is: why methods are skipped, and rows to go on from."""
        rows = [{"method": method, "skipped": reason} | self.origin for method, reason in skipped.items()]
        write_whole(self.path, _lines([*rows, *kept]))

    def append(self, rows: Iterable[Row]) -> None:
        """Add the rows of one batch."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_lines(row | self.origin for row in rows))

    def finished(self, batches: Mapping[Batch, Prompts], temperature: float) -> list[Row]:
        """The rows of the batches that an earlier run has finished; none if there was no such run.

        Raises:
            ValueError: If the earlier run measured something else, or elsewhere, or otherwise.
        """
        found: dict[Batch, list[Row]] = {}
        for row in measured(read_rows(self.path, mend=True)) if self.path.is_file() else ():
            batch = row["mode"], row["prompt"]
            self._check(row, batches.get(batch), temperature)
            found.setdefault(batch, []).append(row)
        return [row for rows in found.values() if len(rows) == len(self.origin["methods"]) for row in rows]

    def _check(self, row: Row, prompts: Prompts | None, temperature: float) -> None:
        for name, value in self.origin.items():
            if name not in DATED and row.get(name) != value:
                self._refuse(name, row.get(name), value)
        sources = None if prompts is None else [source(prompt) for prompt in prompts]
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
    return "".join(json.dumps(_short(row), separators=(",", ":")) + "\n" for row in rows)


def _short(value: Any) -> Any:
    """A value with floats of six digits, which is more than a clock tells."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _short(entry) for name, entry in value.items()}
    return [_short(entry) for entry in value] if isinstance(value, list | tuple) else value
