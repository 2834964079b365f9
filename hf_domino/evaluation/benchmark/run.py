"""A run of `hf-domino bench`: measure, show what was measured, and say which outputs differ."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path

from tqdm.auto import tqdm

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.figures import write_figures
from hf_domino._common.whole_files import check_writable
from hf_domino.evaluation.benchmark.figures import make_figures
from hf_domino.evaluation.benchmark.measure import WARM_UP_TOKENS, WARM_UPS, Bench
from hf_domino.evaluation.benchmark.methods import choose_methods, keeps_seed, needs_drafter
from hf_domino.evaluation.benchmark.prompts import read_batches
from hf_domino.evaluation.benchmark.report import fill_readme, label, plain_label
from hf_domino.evaluation.benchmark.rows import Row, RowsFile, measured, provenance_of_run, read_rows
from hf_domino.evaluation.benchmark.summary import are_ties
from hf_domino.pair import PROMPTS, Pair, check_device, find_pair, load_pair

EXACT_DTYPE = "float32"  # in which greedy output must equal plain generation's


def show(options: argparse.Namespace) -> None:
    """Put the rows that were measured into a README, or draw them."""
    rows = read_rows(options.rows)
    if options.readme:
        fill_readme(options.readme, rows, options.rows.stem)
    if options.figures:
        print(*write_figures(make_figures(rows), options.figures), sep="\n")


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure what the flags ask for and write `--rows`, a batch at a time; returns all rows of the file.

    Raises:
        ValueError: If the flags do not fit one another, the models or the rows that are there.
    """
    _check(options)
    pair = _load(options)
    methods, skipped = choose_methods(pair, options)
    batches = read_batches(_prompts_of(options, pair), options.num_prompts, options.batch_size)
    bench, file = Bench(pair, methods, options), RowsFile(options.rows, provenance_of_run(options, pair, methods))
    todo = {(mode, index): batch for mode in bench.modes for index, batch in enumerate(batches)}
    kept = file.finished(todo, options.temperature) if options.resume else []
    file.start(skipped, kept)
    for done in {(row["mode"], row["prompt"]) for row in kept}:
        del todo[done]
    names = ", ".join(map(plain_label, methods))
    print(f"{len(todo)} texts with each of {names}; {options.repeats} x each", file=sys.stderr)
    if todo:
        start = time.perf_counter()
        bench.warm_up(batches[0])
        warm = WARM_UPS * len(bench.modes) * min(WARM_UP_TOKENS / options.max_new_tokens, 1)  # texts of each method
        seconds = (time.perf_counter() - start) / warm * len(todo) * options.repeats
        print(f"by the first prompt, about {timedelta(seconds=round(seconds))} (h:mm:ss)", file=sys.stderr)
    for (mode, index), batch in tqdm(todo.items(), desc=f"{len(methods)} methods", unit="batch"):
        file.append(bench.measure(mode, index, batch))
    return read_rows(options.rows)


def _load(options: argparse.Namespace) -> Pair:
    names = {name: getattr(options, name) for name in ("target", "twin", "assistant")}
    drafter, *others = options.drafter or [None]
    names |= {"drafter": drafter, "others": others}
    revisions = {"target_revision": options.target_revision, "drafter_revision": options.drafter_revision}
    device, is_drafted = options.device, needs_drafter(options.methods)
    return load_pair(**names, **revisions, dtype=dtype_of(options.dtype), device=device, is_drafted=is_drafted)


def _prompts_of(options: argparse.Namespace, pair: Pair) -> Path:
    """File of prompts: the one that was named, else the target's, else the bundled pair's."""
    own = pair.folder / PROMPTS
    if options.prompts or own.is_file():
        return options.prompts or own
    try:
        return find_pair() / PROMPTS
    except FileNotFoundError as error:
        raise ValueError(f"--prompts must be given: there is no {own}, and no bundled pair.") from error


def _check(options: argparse.Namespace) -> None:
    check_device(options.device)
    if options.rows.exists() and not (options.overwrite or options.resume):
        raise ValueError(
            f"--rows {options.rows} is there already: go on with it (--resume), replace it (--overwrite), or write "
            "elsewhere."
        )
    check_writable(options.rows.parent, "the folder of --rows")


def report_differences(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Say on stderr which outputs differ from plain generation's; returns 1 if any do in fp32 but at a tie, else 0."""
    different: dict[tuple[str, str], list[Row]] = {}
    for row in measured(rows):
        is_promised = row["mode"] == "greedy" or keeps_seed(row["method"])
        if row["equals_plain"] is False and is_promised:
            different.setdefault((row["mode"], row["method"]), []).append(row)
    what = "prompt" if options.batch_size == 1 else "batch"
    for (mode, method), found in different.items():
        kind = "greedy" if mode == "greedy" else "sampled"
        gone = sum(row.get("partings") == [] for row in found)
        print(
            f"DIFFERENT: {kind} output of {label(method)} is not plain generate's for {len(found)} {what}(s), first "
            f"{what} {min(row['prompt'] for row in found)}; {sum(map(are_ties, found))} of them part at a tie"
            f"{f', {gone} not when watched' if gone else ''}.",
            file=sys.stderr,
        )
    if not different or options.dtype == EXACT_DTYPE:
        return 0 if all(map(are_ties, chain(*different.values()))) else 1
    print(
        f"In {options.dtype} a block and single tokens round differently, and an argmax flips where two logits are "
        f"nearly equal. Whether it is that: --dtype {EXACT_DTYPE}, or `hf_domino.shadow`.",
        file=sys.stderr,
    )
    return 0
