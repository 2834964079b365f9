"""Write what the README says of speed from the committed rows.

Between `<!-- speed:begin ROWS [ROWS ...] -->` and `<!-- speed:end -->` stands a sentence, and between `<!-- gain:begin
... -->` and `<!-- gain:end -->` a table. ROWS are files that `hf-domino bench` wrote, as seen from the page's folder.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from hf_domino.evaluation.benchmark.report import markdown_table, modes_of, number
from hf_domino.evaluation.benchmark.rows import Row, measured, read_rows
from hf_domino.evaluation.benchmark.summary import count_equal, rows_of, summarize

EXAMPLES = "  python model_cards/workshop headline README.md\n"
ALONE, WITH_LOOKUP = "domino_adaptive", "domino_lookup"
MARKERS = re.compile(r"(<!-- (speed|gain):begin (\S+(?: \S+)*) -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def sentence(runs: Sequence[Sequence[Row]]) -> str:
    """How many times as fast the best setting of each run is, greedy."""
    found = []
    for rows in runs:
        best = max(filter(None, (_speed_up(rows, method, "greedy") for method in (ALONE, WITH_LOOKUP))))
        found.append(f"**{best:.1f} times as fast** for {_name(rows)}")
    return (
        "`hf_domino` makes a Hugging Face model write faster, and the text stays the model's own:\n"
        f"on two CPU cores up to {' and '.join(found)}.\n"
    )


def table(runs: Sequence[Sequence[Row]]) -> str:
    """The gain of each run, greedy and sampled, and in how many cases the text was plain generation's."""
    modes = {mode: name for rows in runs for mode, name in modes_of(rows).items()}
    lines = [[_name(rows), *(_gain(rows, mode) for mode in modes)] for rows in runs]
    exact = "; ".join(f"{_name(rows)} {_equal(rows)}" for rows in runs)
    return (
        f"{markdown_table(list(modes.values()), lines)}\nTexts that are plain `generate`'s, token by token: {exact}.\n"
    )


def _name(rows: Sequence[Row]) -> str:
    first = measured(rows)[0]
    return f"{first['pair']} in {first['dtype']}"


def _speed_up(rows: Sequence[Row], method: str, mode: str) -> float | None:
    return summarize(rows, method, mode).speed_up if rows_of(rows, method, mode) else None


def _gain(rows: Sequence[Row], mode: str) -> str:
    alone, both = (_speed_up(rows, method, mode) for method in (ALONE, WITH_LOOKUP))
    parts = [number(alone, " x")] * (alone is not None) + [f"with copies {number(both, ' x')}"] * (both is not None)
    return ", ".join(parts)


def _equal(rows: Sequence[Row]) -> str:
    ours = [row for mode in modes_of(rows) for method in (ALONE, WITH_LOOKUP) for row in rows_of(rows, method, mode)]
    return f"{count_equal(ours)} of {len(ours)}"


def fill(page: Path) -> None:
    """Write every marked place of a page anew."""
    write = {"speed": sentence, "gain": table}

    def replace(found: re.Match[str]) -> str:
        return found[1] + write[found[2]]([read_rows(page.parent / name) for name in found[3].split()]) + found[4]

    page.write_text(MARKERS.sub(replace, page.read_text(encoding="utf-8")), encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the page."""
    parser.add_argument("page", type=Path, help="a Markdown file with marked places")


def run(options: argparse.Namespace) -> None:
    """Write the page."""
    fill(options.page)
