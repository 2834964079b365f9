"""Write and read the JSONL file of results, which grows by one batch at a time, so that a run can be resumed.

A result is a line of the file. It holds the measurements of one prompt, or one batch of prompts, with one method in one
mode, and says where and how they were made. A result with `skipped` says why a method was not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_domino._common.errors import invalid_argument
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.benchmark.options import BenchOptions
from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.pair import Pair
from hf_domino.targets.identity import commit_of

Row = dict[str, Any]
OF_OPTIONS = ("batch_size", "max_new_tokens", "repeats", "lookup_tokens", "tree_size", "dtype", "seed")
DATED = "date"  # can differ between the results of a run that was resumed


def origin_of(options: BenchOptions, pair: Pair, methods: Iterable[str]) -> Row:
    """Return the fields that all results of a run share, such as the commits of models from the Hub."""
    assistant = None
    if options.assistant is not None:
        assistant = Path(options.assistant).name
    drafter_commit = None
    if pair.drafter is not None:
        drafter_commit = commit_of(pair.drafter)
    return {
        "methods": list(methods),
        **({"columns": list(options.columns)} if options.columns else {}),
        **{name: getattr(options, name) for name in OF_OPTIONS},
        "assistant": assistant,
        "device": torch.device(options.device).type,
        "pair": pair.name,
        "target_commit": commit_of(pair.target),
        "drafter_commit": drafter_commit,
    } | provenance(options.device)


def read_rows(path: Path, mend: bool = False) -> list[Row]:
    """Read results from a JSONL file; with `mend`, leave out a last line that was not written completely."""
    if not path.is_file():
        raise invalid_argument(
            "results", "a JSONL file", str(path), f"Measure with `hf-domino bench --results {path}`."
        )
    rows: list[Row] = []
    lines = list(filter(bytes.strip, path.read_bytes().splitlines()))
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["method"]
        except (ValueError, TypeError, KeyError) as error:  # not JSON or text, not an object, or another object
            if mend and rows and number == len(lines):  # anywhere else, it is not a file of results
                break
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with a method. A run that was broken off is "
                "finished by its own command."
            ) from error
        rows.append(row)
    return rows


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the results that were measured, not skipped."""
    return [row for row in rows if "skipped" not in row]


def finished(path: Path, origin: Row, batches: Mapping[Any, Any], temperature: float) -> list[Row]:
    """Read the results of finished batches from an earlier run.

    Raises:
        ValueError: If the earlier run used other options, models, prompts, versions or another machine.
    """
    if not path.is_file():
        return []
    found: dict[Any, list[Row]] = {}  # by mode and prompt
    for row in measured(read_rows(path, mend=True)):
        mode = row.get("mode")
        prompt = row.get("prompt")
        batch = (mode, prompt)
        expected = origin | {
            "sources": [source(each) for each in batches.get(batch, ())],
            "temperature": temperature if mode == "sample" else 0.0,
        }
        for name, value in expected.items():
            if name != DATED and row.get(name) != value:
                if name == "sources":
                    name = f"sources of {mode} batch {prompt}"
                there = f"as in {path}, {row.get(name)!r}"
                raise invalid_argument(name, there, value, "Write to another --results, or give --overwrite.")
        found.setdefault(batch, []).append(row)
    return [row for rows in found.values() if len(rows) == len(origin["methods"]) for row in rows]


def to_lines(rows: Iterable[Row]) -> str:
    """Return results as lines of JSON, with floats of six digits, which is more precise than any clock."""
    short = json.loads(json.dumps(list(rows)), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in short)
