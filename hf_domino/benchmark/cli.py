"""`hf-domino bench`: measure, or show what was measured."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from hf_domino.benchmark.figures import draw_figures
from hf_domino.benchmark.measure import Bench
from hf_domino.benchmark.methods import METHODS, choose_methods
from hf_domino.benchmark.models import load_models, prompts_of
from hf_domino.benchmark.prompts import read_batches, source
from hf_domino.benchmark.provenance import provenance
from hf_domino.benchmark.report import details_table, fill_readme, label, modes_of, results_table
from hf_domino.benchmark.rows import Row, RowsFile, measured, read_rows
from hf_domino.pair import DTYPES

EXACT_DTYPE = "float32"  # in which greedy output must equal plain generation's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino bench`."""
    _add_models(parser)
    parser.add_argument(
        "--prompts", type=Path, help="JSONL of prompts (default: prompts.jsonl of the target, or bundled)"
    )
    parser.add_argument("--num-prompts", type=positive_int, default=50, help="use the first N prompts")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="prompts per call, padded on the left")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="tokens to generate per prompt")
    parser.add_argument(
        "--repeats", type=positive_int, default=3, help="timed runs per prompt and method; the median counts"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="temperature of the sampled half; 0 for greedy only"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampled half")
    parser.add_argument("--rows", type=Path, default=Path("results.jsonl"), help="where rows are written, or read from")
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--overwrite", action="store_true", help="measure anew where --rows exists")
    there.add_argument("--resume", action="store_true", help="go on where the run that wrote --rows was broken off")
    parser.add_argument(
        "--readme", type=Path, help="measure nothing: write the table of --rows into this Markdown file"
    )
    parser.add_argument("--figures", type=Path, help="measure nothing: draw --rows as SVG files into this folder")


def _add_models(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument("--target", help="folder or Hub name of a target of your own, in place of --pair")
    parser.add_argument("--drafter", help="its drafter (default: NAME-domino beside the target)")
    parser.add_argument("--twin", help="its DFlash drafter (default: NAME-dflash beside the target, if there is one)")
    parser.add_argument("--assistant", help="a small model with the target's vocabulary, to compare with")
    parser.add_argument(
        "--early-exit", type=positive_int, metavar="N", help="compare with drafts of the first N layers"
    )
    parser.add_argument("--lookup-tokens", type=positive_int, default=10, help="tokens that prompt lookup proposes")
    parser.add_argument(
        "--methods", type=lambda names: names.split(","), help=f"some of {','.join(METHODS)}; plain is always measured"
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=EXACT_DTYPE, help="dtype of all models")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="device of all models")


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a pair and the number of threads."""
    parser.add_argument(
        "--pair", type=Path, help="folder of a target with NAME-domino beside it (default: bundled pair)"
    )
    parser.add_argument(
        "--threads", type=positive_int, default=min(2, os.cpu_count() or 1), help="CPU threads of torch"
    )


def positive_int(text: str) -> int:
    """Read a flag that must be at least 1; argparse reports what this raises."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def set_up(options: argparse.Namespace) -> None:
    """Set torch's threads to `options.threads` and keep Transformers' progress bars out of the output."""
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino bench`; returns 1 where a greedy output differs from plain `generate` in fp32."""
    if options.readme or options.figures:
        rows = read_rows(options.rows)
        if options.readme:
            fill_readme(options.readme, rows)
        for path in draw_figures(rows, options.figures) if options.figures else ():
            print(path)
        return 0
    rows = measure(options)
    print(results_table(rows))
    for mode, name in modes_of(rows).items():
        print(f"{name}:\n\n{details_table(rows, mode)}")
    return _report_differences(rows, options)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure what the flags ask for and write `--rows`, a batch at a time.

    Args:
        options (`argparse.Namespace`): Flags of [`add_arguments`].

    Returns:
        `list[Row]`: All rows of the file.

    Raises:
        ValueError: If the file is there and neither `--overwrite` nor `--resume` says what to do with it.
    """
    if options.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {options.temperature}.")
    if options.rows.exists() and not (options.overwrite or options.resume):
        raise ValueError(
            f"--rows {options.rows} is there already: go on with it (--resume), replace it (--overwrite), or write "
            "elsewhere."
        )
    set_up(options)
    pair = load_models(options)
    methods, skipped = choose_methods(pair, options)
    batches = read_batches(prompts_of(options, pair), options.num_prompts, options.batch_size)
    bench, file = Bench(pair, methods, options), RowsFile(options.rows, provenance(options, pair.name))
    todo = {(mode, index): batch for mode in bench.modes for index, batch in enumerate(batches)}
    kept: list[Row] = []
    if options.resume:
        sources = {key: [source(prompt) for prompt in batch] for key, batch in todo.items()}
        kept = file.resumable(methods, sources, options.temperature)
    for key in {(row["mode"], row["prompt"]) for row in kept}:
        del todo[key]
    file.start(skipped, kept)
    if todo:
        bench.warm_up(batches[0])
    progress = _Progress(len(todo))
    for (mode, index), batch in todo.items():
        progress.show(f"{mode} {index + 1}/{len(batches)}")
        file.append(bench.measure(mode, index, batch))
    progress.end()
    return read_rows(options.rows)


class _Progress:
    """One line that says how far a run has come."""

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()

    def show(self, what: str) -> None:
        """Name the batch that begins, and about how long all of them will take."""
        left = (time.monotonic() - self.start) / self.done * (self.total - self.done) if self.done else None
        about = "" if left is None else f", about {left / 60:.0f} min left"
        print(f"\r{what}{about}   ", end="", file=sys.stderr, flush=True)
        self.done += 1

    def end(self) -> None:
        """End the line."""
        print(file=sys.stderr)


def _report_differences(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Say which greedy outputs differ; the exit code."""
    different: dict[str, list[int]] = {}
    for row in measured(rows):
        if row["equals_plain"] is False:
            different.setdefault(row["method"], []).append(row["prompt"])
    for method, prompts in different.items():
        what = "prompt" if options.batch_size == 1 else "batch"
        print(
            f"DIFFERENT: greedy output of {label(method)} is not plain generate's for {len(prompts)} {what}(s), first "
            f"{what} {min(prompts)}.",
            file=sys.stderr,
        )
    if different and options.dtype != EXACT_DTYPE:
        print(
            f"In {options.dtype} a block and single tokens round differently, and an argmax flips where two logits are "
            f"nearly equal. Whether it is that: --dtype {EXACT_DTYPE}, or `hf_domino.shadow`.",
            file=sys.stderr,
        )
        return 0
    return 1 if different else 0
