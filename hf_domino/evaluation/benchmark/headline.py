"""What the README's first screen says of speed: one sentence and a small table, computed from measured rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hf_domino.evaluation.benchmark.methods import BASELINE
from hf_domino.evaluation.benchmark.report import markdown_table, modes_of, number, place_of
from hf_domino.evaluation.benchmark.rows import Row, measured, read_rows
from hf_domino.evaluation.benchmark.summary import count_equal, rows_of, summarize

# The methods a user would choose, and what they are called on the first screen.
OURS = {"domino_adaptive": "drafter", "domino_lookup": "drafter and prompt lookup"}
LOOKUP = "prompt_lookup"  # what needs no drafter, and a drafter must beat
HEADS = ("precision", "greedy tokens/s, plain → assisted", "greedy", "sampled", "prompt lookup alone", "texts equal")
MARKERS = re.compile(r"(<!-- headline:begin (\S+(?: \S+)*) -->\n).*?(<!-- headline:end -->)", re.DOTALL)


def headline(runs: Sequence[Sequence[Row]]) -> str:
    """Say in a sentence and a table how much faster a drafter makes `generate`, and whether its text is the same.

    Args:
        runs (`Sequence[Sequence[Row]]`): The rows of some runs of `hf-domino bench`, one target each.

    Returns:
        `str`: Markdown.
    """
    lines = [line for rows in runs for line in _lines(rows)]
    return f"{_sentence(runs)}\n\n{markdown_table(HEADS, lines)}"


def _sentence(runs: Sequence[Sequence[Row]]) -> str:
    """The fastest of each target, with what it was measured on."""
    best = []
    for rows in runs:
        first = measured(rows)[0]
        ratio = max(summarize(rows, method, "greedy").speed_up for method in OURS if rows_of(rows, method, "greedy"))
        best.append(f"**{ratio:.1f} times as fast** for {first['pair']} in {first['dtype']}")
    places = dict.fromkeys(place_of(measured(rows)[0], "a CPU") for rows in runs)
    return f"At best, `generate` is {' and '.join(best)} (greedy, one prompt at a time, {' and '.join(places)})."


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    first, found = measured(rows)[0], []
    for method, name in OURS.items():
        if not rows_of(rows, method, "greedy"):
            continue
        plain, fast = (summarize(rows, one, "greedy").tokens_per_second for one in (BASELINE, method))
        ours = [row for mode in modes_of(rows) for row in rows_of(rows, method, mode)]
        alone = ", ".join(filter(None, _speed_ups(rows, LOOKUP)))
        cells = [first["dtype"], f"{plain:.0f} → {fast:.0f}", *_speed_ups(rows, method), alone]
        found.append([f"{first['pair']}, {name}", *cells, f"{count_equal(ours)} of {len(ours)}"])
    return found


def _speed_ups(rows: Sequence[Row], method: str) -> list[str]:
    """Over plain generation, greedy and sampled; empty where that was not measured."""
    known = {mode: bool(rows_of(rows, method, mode)) for mode in ("greedy", "sample")}
    return [number(summarize(rows, method, mode).speed_up if known[mode] else None, " x") for mode in known]


def fill_headline(page: Path) -> None:
    """Write the headline between `<!-- headline:begin ROWS [ROWS ...] -->` and `<!-- headline:end -->`.

    Args:
        page (`Path`): A Markdown file; the markers name files of rows, as seen from its folder.
    """

    def fill(found: re.Match[str]) -> str:
        runs = [read_rows(page.parent / name) for name in found[2].split()]
        return found[1] + headline(runs) + found[3]

    page.write_text(MARKERS.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")
