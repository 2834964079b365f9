"""From measured rows to the table that is published: no figure is typed by hand.

A row is one prompt, or one batch of them, under one method and one mode; [`hf_domino.benchmark`] writes them, a README
shows their summary.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

METHODS = {
    "plain": "plain `generate`",
    "prompt_lookup": "prompt lookup",
    "dflash": "DFlash twin",
    "domino": "**Domino**",
}
MARKERS = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)


@dataclass(frozen=True)
class Summary:
    """One method in one mode over all prompts.

    Args:
        tokens_per_second (`float`): Median over prompts.
        speed_up (`float`): `tokens_per_second` over plain generation's.
        acceptance_length (`float`, *optional*): Mean over all rounds of all prompts; None without a drafter of ours.
        distinct_4gram (`float`): Mean over prompts of the share of 4-grams that are new.
        num_equal (`int`, *optional*): Prompts whose tokens equal plain generation's; None when sampling.
        num_prompts (`int`): Prompts measured.
    """

    tokens_per_second: float
    speed_up: float
    acceptance_length: float | None
    distinct_4gram: float
    num_equal: int | None
    num_prompts: int


def read_rows(path: Path) -> list[Row]:
    """Read measured rows from a JSONL file.

    Raises:
        ValueError: If there is none.
    """
    if not path.is_file():
        raise ValueError(f"rows must be a JSONL file, got {str(path)!r}: measure with `hf-domino bench --rows {path}`.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def summarize(rows: Sequence[Row], method: str, mode: str) -> Summary:
    """Summarize one method in one mode.

    Args:
        rows (`Sequence[Row]`): Rows of one run.
        method (`str`): One of `METHODS`.
        mode (`str`): `"greedy"` or `"sample"`.

    Raises:
        ValueError: If there are no such rows.
    """
    chosen = [row for row in rows if row["method"] == method and row["mode"] == mode]
    plain = [row["tokens_per_second"] for row in rows if row["method"] == "plain" and row["mode"] == mode]
    if not chosen or not plain:
        raise ValueError(f"no rows with method={method!r} and mode={mode!r}: measure them with `hf-domino bench`.")
    speed = statistics.median(row["tokens_per_second"] for row in chosen)
    return Summary(
        tokens_per_second=speed,
        speed_up=speed / statistics.median(plain),
        acceptance_length=_mean_acceptance(chosen),
        distinct_4gram=statistics.fmean(row["distinct_4gram"] for row in chosen),
        num_equal=None if mode == "sample" else sum(bool(row["equals_plain"]) for row in chosen),
        num_prompts=len(chosen),
    )


def _mean_acceptance(rows: Iterable[Row]) -> float | None:
    counted = [row for row in rows if row["num_rounds"]]
    rounds = sum(row["num_rounds"] for row in counted)
    return sum(row["acceptance_length"] * row["num_rounds"] for row in counted) / rounds if rounds else None


def results_table(rows: Sequence[Row]) -> str:
    """Render the published table as Markdown, with a caption that says where and how it was measured."""
    sampled = next((row["temperature"] for row in rows if row["mode"] == "sample"), None)
    modes = ["greedy"] if sampled is None else ["greedy", "sample"]
    heads = {"greedy": "greedy", "sample": f"T = {sampled}"}
    columns = [f"{heads[mode]}, {what}" for mode in modes for what in ("tokens/s", "speed-up", "acceptance length")]
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    measured = {row["method"] for row in rows}
    for method, label in METHODS.items():
        if method in measured:
            cells = [cell for mode in modes for cell in _cells(summarize(rows, method, mode))]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + caption(rows) + "\n"


def _cells(summary: Summary) -> list[str]:
    length = summary.acceptance_length
    return [
        f"{summary.tokens_per_second:.0f}",
        f"{summary.speed_up:.2f} x",
        "" if length is None else f"{length:.2f}",
    ]


def caption(rows: Sequence[Row]) -> str:
    """Say in one paragraph what the rows were measured on, and whether greedy outputs were equal."""
    first = rows[0]
    greedy = [row for row in rows if row["mode"] == "greedy" and row["method"] != "plain"]
    num_equal = sum(bool(row["equals_plain"]) for row in greedy)
    prompts = sum(len(row["sources"]) for row in rows if (row["method"], row["mode"]) == ("plain", "greedy"))
    threads, repeats = _count(first["threads"], "thread"), _count(first["repeats"], "repeat")
    return (
        f"{first['pair']}, {prompts} held-out prompts x {first['max_new_tokens']} new tokens, batch "
        f"{first['batch_size']}, {first['dtype']}, {threads} of {first['hardware']}; all methods "
        f"interleaved in one process, median of {repeats} a prompt, then over prompts; speed-up over "
        f"plain. Greedy outputs equal to plain `generate`: {num_equal} of {len(greedy)}. torch {first['torch']}, "
        f"transformers {first['transformers']}, commit {first['commit'][:7]}, seed {first['seed']}, {first['date']}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def fill_readme(readme: Path, rows: Sequence[Row]) -> None:
    """Write the table between the markers `<!-- results:begin -->` and `<!-- results:end -->`.

    Args:
        readme (`Path`): A Markdown file with both markers.
        rows (`Sequence[Row]`): Rows of one run.

    Raises:
        ValueError: If the markers are missing.
    """
    text = readme.read_text(encoding="utf-8")
    if not MARKERS.search(text):
        raise ValueError(f"{readme} has no lines <!-- results:begin --> and <!-- results:end --> to write between.")
    readme.write_text(MARKERS.sub(lambda found: found[1] + results_table(rows) + found[2], text), encoding="utf-8")
