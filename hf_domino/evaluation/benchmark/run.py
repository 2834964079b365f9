"""A whole benchmark: load, choose, measure batch by batch, and say which outputs differ."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from tqdm.auto import tqdm

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import check_writable, write_whole
from hf_domino.evaluation.benchmark.measure import WARM_UP_TOKENS, WARM_UPS, Bench
from hf_domino.evaluation.benchmark.methods import choose_methods
from hf_domino.evaluation.benchmark.options import BenchOptions, keeps_seed
from hf_domino.evaluation.benchmark.prompts import read_batches
from hf_domino.evaluation.benchmark.report import label, plain_label
from hf_domino.evaluation.benchmark.rows import Row, finished, measured, origin_of, to_lines
from hf_domino.evaluation.benchmark.summary import are_ties, rows_of
from hf_domino.pair import PROMPTS, Pair, check_device, find_pair, load_pair

EXACT_DTYPE = "float32"  # in which greedy output must equal plain generation's


def benchmark(options: BenchOptions) -> list[Row]:
    """Measure every way to generate that the options ask for, in one process, and return a row a prompt and method.

    Rows are written to `options.rows` a batch at a time, if it is given. `summary.summarize` and `report.results_table`
    say what they hold.

    Args:
        options ([`BenchOptions`]): What to measure, on which texts.

    Raises:
        ValueError: If the options do not fit one another, the models or the rows that are there.

    Example:
    ```python
    >>> from hf_domino.evaluation.benchmark.report import plain_label
    >>> from hf_domino.evaluation.benchmark.run import BenchOptions, benchmark
    >>> options = BenchOptions(methods=("domino",), num_prompts=1, max_new_tokens=8, repeats=1, temperature=0.0)
    >>> [(plain_label(row["method"]), row["equals_plain"]) for row in benchmark(options)]  # of the bundled pair
    [('plain generate', True), ('Domino, whole blocks', True)]

    ```
    """
    check_device(options.device)
    path = options.rows
    if path is not None:
        if path.exists() and not (options.overwrite or options.resume):
            remedy = "Go on with it (--resume), replace it (--overwrite), or write elsewhere."
            raise refusal("--rows", "a new file", str(path), remedy)
        check_writable(path.parent, "the folder of --rows")
    drafter, *others = options.drafter or (None,)
    pair = load_pair(
        options.target,
        drafter,
        options.twin,
        options.assistant,
        dtype=dtype_of(options.dtype),
        device=options.device,
        target_revision=options.target_revision,
        drafter_revision=options.drafter_revision,
        others=others,
        is_drafted=options.needs_drafter,
    )
    methods, skipped = choose_methods(pair, options)
    batches = read_batches(prompts_of(pair, options.prompts), options.num_prompts, options.batch_size)
    bench, origin = Bench(pair, methods, options), origin_of(options, pair, methods)
    todo = {(mode, index): batch for mode in bench.modes for index, batch in enumerate(batches)}
    kept = finished(path, origin, todo, options.temperature) if path is not None and options.resume else []
    rows = [{"method": method, "skipped": reason} | origin for method, reason in skipped.items()] + kept
    if path is not None:
        write_whole(path, to_lines(rows))
    for done in {(row["mode"], row["prompt"]) for row in kept}:
        del todo[done]
    _warm_up(bench, batches[0], len(todo))
    for (mode, index), batch in tqdm(todo.items(), desc=f"{len(methods)} methods", unit="batch"):
        found = [row | origin for row in bench.measure(mode, index, batch)]
        rows += found
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(to_lines(found))
    return rows


def _warm_up(bench: Bench, batch: Sequence[dict], num_texts: int) -> None:
    """Run every method before it is timed, and say on stderr how long the rest will take."""
    options, names = bench.options, ", ".join(map(plain_label, bench.methods))
    print(f"methods: {names}; texts of each: {num_texts}, repeats: {options.repeats}", file=sys.stderr)
    if num_texts:
        start = time.perf_counter()
        bench.warm_up(batch)
        warm = WARM_UPS * len(bench.modes) * min(WARM_UP_TOKENS / options.max_new_tokens, 1)  # texts of each method
        seconds = (time.perf_counter() - start) / warm * num_texts * options.repeats
        print(f"this takes about {timedelta(seconds=round(seconds))} (h:mm:ss), by the first prompt", file=sys.stderr)


def prompts_of(pair: Pair, given: Path | None) -> Path:
    """File of prompts: the one that was named, else the target's, else the bundled pair's."""
    own = pair.folder / PROMPTS
    if given or own.is_file():
        return given or own
    try:
        return find_pair() / PROMPTS
    except FileNotFoundError as error:
        raise ValueError(f"--prompts must be given: there is no {own}, and no bundled pair.") from error


def report_differences(rows: Sequence[Row]) -> bool:
    """Say on stderr which outputs differ from plain generation's; whether any do in fp32, but at a tie."""
    different = [row for row in measured(rows) if row["equals_plain"] is False]
    wrong = [row for row in different if row["mode"] == "greedy" or keeps_seed(row["method"])]
    for mode, method in dict.fromkeys((row["mode"], row["method"]) for row in wrong):
        found = rows_of(wrong, method, mode)
        what = "prompt" if found[0]["batch_size"] == 1 else "batch"
        kind = "greedy" if mode == "greedy" else "sampled"
        print(
            f"DIFFERENT: {kind} output of {label(method)} is not plain generate's for {len(found)} {what}(s), first "
            f"{what} {min(row['prompt'] for row in found)}; {sum(map(are_ties, found))} of them part at a tie.",
            file=sys.stderr,
        )
    if not wrong or wrong[0]["dtype"] == EXACT_DTYPE:
        return not all(map(are_ties, wrong))
    print(
        f"In {wrong[0]['dtype']} a block and single tokens round differently, and an argmax flips where two logits are "
        f"nearly equal. Whether it is that: --dtype {EXACT_DTYPE}.",
        file=sys.stderr,
    )
    return False
