"""The file of measured rows, JSONL: written a batch at a time, read back by tables and figures, taken up again.

A row is one prompt, or one batch of them, under one method and one mode, with where and how it was measured. A row
with `skipped` says instead why a method was not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_domino._common.provenance import provenance
from hf_domino._common.refusal import refusal
from hf_domino.evaluation.benchmark.options import BenchOptions
from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.pair import Pair
from hf_domino.target.identity import commit_of

Row = dict[str, Any]
OF_OPTIONS = ("batch_size", "max_new_tokens", "repeats", "lookup_tokens", "tree_size", "dtype", "seed")
DATED = "date"  # may differ between rows of one run that was taken up again


def origin_of(options: BenchOptions, pair: Pair, methods: Iterable[str]) -> Row:
    """Fields that every row of a run carries, the commits of what came from the Hub among them."""
    return {
        "methods": list(methods),
        **{name: getattr(options, name) for name in OF_OPTIONS},
        "assistant": options.assistant and Path(options.assistant).name,
        "device": torch.device(options.device).type,
        "pair": pair.name,
        "target_commit": commit_of(pair.target),
        "drafter_commit": pair.drafter and commit_of(pair.drafter),
    } | provenance(options.device)


def read_rows(path: Path, mend: bool = False) -> list[Row]:
    """Read measured rows from a JSONL file; `mend` leaves out a last line that was broken off while it was written."""
    if not path.is_file():
        raise refusal("rows", "a JSONL file", str(path), f"Measure with `hf-domino bench --rows {path}`.")
    rows, lines = list[Row](), list(filter(bytes.strip, path.read_bytes().splitlines()))
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["method"]
        except (ValueError, TypeError, KeyError) as error:  # of JSON or of text, of another value, of another object
            if mend and rows and number == len(lines):  # else it is another file
                break
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a method. A run that was broken off is "
                "finished by its own command."
            ) from error
        rows.append(row)
    return rows


def measured(rows: Iterable[Row]) -> list[Row]:
    """The rows that were measured."""
    return [row for row in rows if "skipped" not in row]


def finished(path: Path, origin: Row, batches: Mapping[Any, Any], temperature: float) -> list[Row]:
    """Read the rows of finished batches from an earlier run, which must have measured the same in the same way."""
    found: dict[Any, list[Row]] = {}  # by mode and prompt
    for row in measured(read_rows(path, mend=True)) if path.is_file() else ():
        mode, prompt = batch = row.get("mode"), row.get("prompt")
        expected = {name: value for name, value in origin.items() if name != DATED}
        expected["sources"] = [source(each) for each in batches.get(batch, ())]
        expected["temperature"] = temperature if mode == "sample" else 0.0
        for name, value in expected.items():
            if row.get(name) != value:
                name = f"{name} of {mode} batch {prompt}" if name == "sources" else name
                there = f"as in {path}, {row.get(name)!r}"
                raise refusal(name, there, value, "Write to another --rows, or give --overwrite.")
        found.setdefault(batch, []).append(row)
    return [row for rows in found.values() if len(rows) == len(origin["methods"]) for row in rows]


def to_lines(rows: Iterable[Row]) -> str:
    """Rows as JSON, a line each, with floats of six digits, which is more than a clock tells."""
    short = json.loads(json.dumps(list(rows)), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in short)
