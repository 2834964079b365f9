"""Run a benchmark: load the models, choose methods, measure batch by batch, and report outputs that differ."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from tqdm.auto import tqdm

from hf_domino._common.atomic_writes import check_writable, write_atomic
from hf_domino._common.errors import invalid_argument
from hf_domino._common.provenance import provenance
from hf_domino.data.prompts import read_prompts
from hf_domino.evaluation.benchmark.measure import Bench
from hf_domino.evaluation.benchmark.methods import choose_methods
from hf_domino.evaluation.benchmark.options import ALL, FREE, BenchOptions, keeps_seed
from hf_domino.evaluation.benchmark.report import label, plain_label
from hf_domino.evaluation.benchmark.rows import finished, settings_of
from hf_domino.evaluation.benchmark.summary import are_ties, rows_of
from hf_domino.evaluation.results import Result, append_results, measured, to_lines
from hf_domino.formats.source import RECYCLING
from hf_domino.pair import NO_DRAFTER, choose_dtype, load_pair, prompts_for

EXACT_DTYPE = "float32"  # the dtype in which greedy output must equal that of plain generation


def benchmark(options: BenchOptions) -> list[Result]:
    """Measure the methods that the options ask for, and return a result for each batch of prompts, method and mode.

    Results are written one batch at a time. Results of the same run that the file already has are kept.
    """
    if options.results.is_dir():
        raise invalid_argument("--results", "a file", str(options.results), "Name one in it, such as results.jsonl.")
    check_writable(options.results.parent, "the folder of --results")
    if options.prompts is not None:  # a wrong file is an error before models are loaded
        read_prompts(options.prompts, is_chat=True)
    dtype = choose_dtype(options.dtype, options.device, options.target, options.trust_remote_code)
    options = replace(options, dtype=str(dtype).removeprefix("torch."))
    drafter, *others = options.drafter or (None,)
    pair = load_pair(
        options.target,
        drafter,
        options.assistant,
        dtype=dtype,
        device=options.device,
        others=others,
        is_drafted=options.needs_drafter,
        chat_template_kwargs=options.chat_template_kwargs,
        trust_remote_code=options.trust_remote_code,
    )
    is_free = pair.drafter is None or list(pair.drafters) == [RECYCLING]
    if pair.drafter is None and (options.methods in (None, (ALL,)) or options.tree_size is not None):
        pair = pair.recycled()
        print(NO_DRAFTER, file=sys.stderr)
    if is_free and options.methods is None and options.tree_size is None:
        pair = replace(pair, drafters={})
        options = replace(options, methods=FREE)
    methods, skipped = choose_methods(pair, options)
    prompts, whose = prompts_for(pair, options.prompts)
    prompts = prompts[: options.num_prompts]
    size = options.batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    bench = Bench(pair, methods, options)
    settings = settings_of(options, pair, methods) | {"prompts": whose}
    made = provenance(options.device)
    todo = {(mode, index): batch for mode in bench.modes for index, batch in enumerate(batches)}
    kept = []
    if not options.overwrite:
        kept = finished(options.results, settings, made, todo, options.temperature)
    rows = [Result(method, settings, {"skipped": reason}, made) for method, reason in skipped.items()] + kept
    write_atomic(options.results, to_lines(rows))
    for done in {(row["mode"], row["prompt"]) for row in kept}:
        del todo[done]
    names = ", ".join(map(plain_label, methods))
    print(f"methods: {names}; texts of each: {len(todo)}, repeats: {options.repeats}", file=sys.stderr)
    if todo:
        with tqdm(desc="warm-up", total=bench.runs_of_warm_up, unit="run", leave=False) as bar:
            bench.warm_up(batches[0], bar.update)
    runs = len(todo) * len(methods) * options.repeats
    with tqdm(desc=f"{len(methods)} methods", total=runs, unit="run") as bar:
        for (mode, index), batch in todo.items():
            found = [
                replace(result, settings={**result.settings, **settings}, provenance=made)
                for result in bench.measure(mode, index, batch, bar.update)
            ]
            rows += found
            append_results(options.results, found)
            speeds = "; ".join(f"{plain_label(each.method)} {each['tokens_per_second']:.3g}" for each in found)
            bar.write(f"{mode} {index + 1}: {speeds} tokens/s", file=sys.stderr)
    return rows


def report_differences(rows: Sequence[Result]) -> bool:
    """Print which outputs differ from those of plain generation; return whether one in fp32 differs without a tie."""
    different = [row for row in measured(rows) if row["equals_plain"] is False]
    wrong = [row for row in different if row["mode"] == "greedy" or keeps_seed(row["method"])]
    for mode, method in dict.fromkeys((row["mode"], row["method"]) for row in wrong):
        found = rows_of(wrong, method, mode)
        if found[0]["batch_size"] == 1:
            what = "prompt"
        else:
            what = "batch"
        choice = "greedy" if mode == "greedy" else "sampled"
        print(
            f"DIFFERENT: {choice} output of {label(method)} is not plain generate's for {len(found)} {what}(s), first "
            f"{what} {min(row['prompt'] for row in found)}; {sum(map(are_ties, found))} of them diverge at a tie.",
            file=sys.stderr,
        )
    if not wrong or wrong[0]["dtype"] == EXACT_DTYPE:
        return not all(map(are_ties, wrong))
    print(
        f"In {wrong[0]['dtype']} blocks and single tokens round differently, so the likelier of two tokens with nearly "
        f"equal logits can change. Run with --dtype {EXACT_DTYPE} to see whether that is the reason.",
        file=sys.stderr,
    )
    return False
