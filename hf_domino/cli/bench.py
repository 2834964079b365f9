"""`hf-domino bench`: measure how fast each method generates."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from hf_domino._common.atomic_writes import check_writable
from hf_domino._common.options import add_flags
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.flags import add_models, default_device, set_up
from hf_domino.evaluation.benchmark.options import MEASURED, MODELS, RESULTS, TEXTS, BenchOptions

EXAMPLES = """\
  hf-domino bench --num-prompts 5 --repeats 1
  hf-domino bench --target Qwen/Qwen3-0.6B --drafter my-drafter --prompts prompts.jsonl --results results.jsonl
  hf-domino bench --target Qwen/Qwen3-0.6B --drafter my-domino --drafter my-dspark --prompts prompts.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino bench`: the flags of the models, and the fields of `BenchOptions`."""
    groups = {title: parser.add_argument_group(title) for title in (MODELS, TEXTS, MEASURED, RESULTS)}
    add_models(groups[MODELS], measures=True)
    for title, group in groups.items():
        add_flags(group, BenchOptions, title)


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino bench`, and return 1 if an output in fp32 differs from plain `generate` without a tie."""
    options.device = options.device or default_device()
    options.drafter = tuple(options.drafter or ())
    asked = BenchOptions(**{option.name: getattr(options, option.name) for option in fields(BenchOptions)})
    set_up(options.threads)
    from rich.console import Console
    from rich.markdown import Markdown

    from hf_domino.evaluation.benchmark import figures, report
    from hf_domino.evaluation.benchmark.run import benchmark, report_differences

    if asked.figures is not None:
        figures.check_matplotlib()
        check_writable(asked.figures, "--figures")
    rows = benchmark(asked)
    print(f"results: {options.results}", file=sys.stderr)
    differs = report_differences(rows)
    for mode, name in report.modes_of(rows).items():
        Console().print(Markdown(report.speeds_table(rows, {mode: name})))
    print(f"\n{report.caption(rows)}\n")
    print(*report.comparisons(rows), report.conclusion(rows), sep="\n")
    if asked.figures is not None:
        print("figures:", *figures.write_figures(rows, asked.figures), file=sys.stderr)
    return FAILED_CHECK if differs else 0
