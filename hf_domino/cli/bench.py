"""`hf-domino bench`: measure every way to generate, or show what was measured."""

from __future__ import annotations

import argparse
import sys
from itertools import count
from pathlib import Path
from typing import Any

from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.cli.flags import METHODS, add_models, check_temperature, default_device, positive_int, set_up

ROWS = Path("results.jsonl")  # where no other file is named
EXAMPLES = """\
  hf-domino bench --num-prompts 5 --repeats 1
  hf-domino bench --target Qwen/Qwen3-0.6B --drafter my-drafter --prompts prompts.jsonl --rows rows.jsonl
  hf-domino bench --target Qwen/Qwen3-0.6B --drafter my-domino --drafter my-medusa --prompts prompts.jsonl
  hf-domino bench --rows rows.jsonl --figures figures
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino bench`."""
    _add_models(parser.add_argument_group("models"))
    add = parser.add_argument_group("texts").add_argument
    add("--prompts", type=Path, help=f"records with {PROMPT_FIELDS} (default: prompts.jsonl of the target, or bundled)")
    add("--num-prompts", type=positive_int, default=50, help="use the first N prompts")
    add("--batch-size", type=positive_int, default=1, help="prompts per call, padded on the left")
    add("--max-new-tokens", type=positive_int, default=128, help="tokens to generate per prompt")
    _add_methods(parser.add_argument_group("what is measured"))
    group = parser.add_argument_group("rows")
    group.add_argument(
        "--rows",
        type=Path,
        help=f"where rows are written, or read from (default: {ROWS}, or with a number where that is there)",
    )
    there = group.add_mutually_exclusive_group()
    there.add_argument("--overwrite", action="store_true", help="measure anew where --rows exists")
    there.add_argument("--resume", action="store_true", help="go on where the run that wrote --rows was broken off")
    group.add_argument(
        "--markdown", action="store_true", help="print the tables as Markdown, with all that was measured"
    )
    add = parser.add_argument_group("instead of measuring").add_argument
    add("--readme", type=Path, help="write the table of --rows into this Markdown file")
    add("--figures", type=Path, help="draw --rows as SVG files into this folder")


def _add_models(group: argparse._ArgumentGroup) -> None:
    add_models(group, measures=True, several=True)
    group.add_argument("--target-revision", help="branch, tag or commit of --target on the Hub (default: main)")
    group.add_argument("--drafter-revision", help="branch, tag or commit on the Hub of the first --drafter (main)")
    group.add_argument(
        "--twin", help="a DFlash drafter to compare with (default: NAME-dflash, where there is no --drafter)"
    )
    group.add_argument("--assistant", help="a small model with the target's vocabulary, to compare with")


def _add_methods(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--methods",
        type=lambda names: [name.strip() for name in names.split(",")],
        help=f"all, or some of {', '.join(METHODS)}; plain is always measured; domino and dflash draft whole blocks, "
        "domino_adaptive and dflash_adaptive as far as it pays, which is a drafter's default; domino_lookup may also "
        "copy from the text (default: plain, prompt_lookup, domino_adaptive, domino_lookup, and what other flags name)",
    )
    group.add_argument("--early-exit", type=positive_int, metavar="N", help="compare with drafts of the first N layers")
    group.add_argument(
        "--tree-size", type=positive_int, metavar="N", help="compare trees of up to N nodes with chains of each drafter"
    )
    group.add_argument("--lookup-tokens", type=positive_int, default=10, help="most tokens that prompt lookup proposes")
    group.add_argument(
        "--repeats", type=positive_int, default=3, help="timed runs per prompt and method; the median counts"
    )
    group.add_argument(
        "--temperature", type=float, default=0.7, help="temperature of the sampled half; 0 for greedy only"
    )
    group.add_argument("--seed", type=int, default=0, help="seed of the sampled half")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino bench`; returns 1 where a greedy output differs from plain `generate` in fp32."""
    from hf_domino.evaluation.benchmark import report
    from hf_domino.evaluation.benchmark.run import measure, report_differences, show

    is_new = not (options.readme or options.figures or options.overwrite or options.resume)
    options.rows = options.rows or (_free(ROWS) if is_new else ROWS)
    if options.readme or options.figures:
        show(options)
        return 0
    check_temperature(options.temperature)
    options.device = options.device or default_device()
    set_up(options.threads)
    rows = measure(options)
    print(f"rows: {options.rows}", file=sys.stderr)
    exit_code = report_differences(rows, options)
    if options.markdown:
        print(report.results_table(rows), report.details(rows), sep="\n")
    else:
        _print_tables(rows)
    print(report.conclusion(rows))
    return exit_code


def _print_tables(rows: list[Any]) -> None:
    """What was measured, for a terminal of 80 columns: a table for each mode, and what is to be said of it."""
    from rich.console import Console
    from rich.table import Table

    from hf_domino.evaluation.benchmark import report, summary

    console = Console(highlight=False)
    for mode, name in report.modes_of(rows).items():
        table = Table(name, box=None, pad_edge=False)
        for head in ("tokens/s", "speed-up", "acceptance length", "texts equal"):
            table.add_column(head, justify="right")
        for method in report.methods_of(rows):
            one = summary.summarize(rows, method, mode)
            cells = f"{one.tokens_per_second:.0f}", report.number(one.speed_up, " x"), report.acceptance_of(one)
            table.add_row(report.plain_label(method), *cells, f"{one.num_equal} of {one.num_prompts}")
        console.print(table, "")
    print(report.caption(rows), *(f"- {each}" for each in report.comparisons(rows)), "", sep="\n")


def _free(path: Path) -> Path:
    """The path, or the first with a number that is not taken: measured rows are never lost silently."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(other for other in others if not other.exists()) if path.exists() else path
