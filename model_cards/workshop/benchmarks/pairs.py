"""Tokens a second of a target with its drafter on a GPU, compiled and not, beside plain generation of both.

    python model_cards/workshop/benchmarks/pairs.py                                       # the bundled pair
    python model_cards/workshop/benchmarks/pairs.py --target work/smollm2-135m-instruct --dtype bfloat16
    python model_cards/workshop/benchmarks/pairs.py --target Qwen/Qwen3-8B --drafter recycling --dtype bfloat16

On a GPU, Transformers compiles plain generation by itself where the cache is static, so that is the speed to beat; a
call with a drafter and a static cache is compiled, too. All methods run before they are timed, on the longest prompt
first, so that no buffer grows and nothing compiles later, and for a few tokens on every other prompt, whose length is
new. Token recycling begins each text with an empty table. Prompts are measured in turn, greedy and sampled, until all
are done or the time is over; every row is kept at once.

    python model_cards/workshop/benchmarks/pairs.py --batch-size 8 --turns turns     # eight prompts at once

Several of these commands may run beside each other with the same `--turns FILE`: they compile at the same time, and
time one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import GenerationConfig

import hf_domino
from hf_domino._common.atomic_writes import check_writable
from hf_domino._common.dtypes import dtype_of
from hf_domino._common.provenance import provenance
from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.data.prompts import encode_prompt
from hf_domino.data.writers import cut_at_end
from hf_domino.evaluation.benchmark.prompts import inputs_of
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.evaluation.results import Result, append_results, read_results
from hf_domino.pair import Pair, load_pair, prompts_for

STATIC = {"cache_implementation": "static"}
LOOKUP = {"prompt_lookup_num_tokens": 10}
TREE_SIZE = 16
FEW_TOKENS = 4  # of the texts that are not timed
PLAIN = "plain"
THEIR_LOOP = "their_loop"  # marks a method that runs our candidate generator in Transformers' own assisted loop
MODES = ("greedy", "sample")


def methods_of(pair: Pair) -> dict[str, dict[str, Any]]:
    """What each method adds to a call of `generate`."""
    drafter = pair.drafter
    assert drafter is not None
    full = {"assistant_model": drafter.view(draft_length="full")}
    return {
        PLAIN: {},
        "plain, static": STATIC,
        "Transformers' prompt lookup": LOOKUP,
        "Transformers' prompt lookup, static": STATIC | LOOKUP,
        "drafter": {"assistant_model": drafter},
        "drafter, Transformers' loop, static": {"assistant_model": drafter, THEIR_LOOP: True} | STATIC,
        "drafter, prompt lookup": {"assistant_model": drafter} | LOOKUP,
        "drafter, full blocks": full,
        "drafter, trees": {"assistant_model": drafter.view(draft_length="full", draft_tree_size=TREE_SIZE)},
        "drafter, static": {"assistant_model": drafter} | STATIC,
        "drafter, static, prompt lookup": {"assistant_model": drafter} | STATIC | LOOKUP,
        "drafter, static, full blocks": full | STATIC,
    }


def measure(pair: Pair, methods: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Time all methods on prompt after prompt, and write a row of each to `options.results`, replacing its old ones."""
    prompts = prompts_for(pair, options.prompts)[0][: options.num_prompts]
    prompts.sort(key=lambda prompt: -len(encode_prompt(prompt, pair.tokenizer)))
    size = options.batch_size
    encoded = [inputs_of(pair, prompts[start : start + size]) for start in range(0, len(prompts), size)]
    options.results.write_text("")  # what was there before stays until models and prompts have been read
    fields = ("max_new_tokens", "dtype", "seed", "batch_size")
    settings = {name: getattr(options, name) for name in fields} | {"target": pair.name, "drafter": pair.drafter_name}
    settings["models"] = pair.models
    made = provenance(options.device)
    turns = contextlib.nullcontext() if options.turns is None else FileLock(options.turns)
    broken: set[str] = set()
    start = time.perf_counter()
    for mode in MODES:
        for method in tqdm(methods, f"first texts, {mode}"):
            for _ in range(2):
                if method not in broken and _run(pair, encoded[0], methods[method], mode, options) is None:
                    broken.add(method)
    print(f"first texts took {time.perf_counter() - start:.0f} s", file=sys.stderr)
    start = time.perf_counter()
    for index, inputs in enumerate(tqdm(encoded, "prompts")):
        with turns:
            rows = _measure_batch(pair, methods, broken, inputs, options)
        append_results(
            options.results,
            [replace(row, settings={"prompt": index, **row.settings, **settings}, provenance=made) for row in rows],
        )
        if time.perf_counter() - start > options.seconds:
            break


def _measure_batch(
    pair: Pair, methods: dict[str, dict[str, Any]], broken: set[str], inputs: Any, options: argparse.Namespace
) -> list[Result]:
    """Results of every method that works, greedy and sampled, for one batch."""
    for method, arguments in methods.items():
        if method not in broken:
            _run(pair, inputs, arguments | {"max_new_tokens": FEW_TOKENS}, "greedy", options)
    rows = []
    for mode in MODES:
        expected = None
        for method, arguments in methods.items():
            found = None if method in broken else _run(pair, inputs, arguments, mode, options)
            if found is None:
                continue
            figures, text = found
            expected = text if expected is None else expected
            about = {"mode": mode, "temperature": options.temperature if mode != "greedy" else 0.0}
            rows.append(Result(method, about, {"equals_plain": torch.equal(text, expected)} | figures))
    return rows


def _run(
    pair: Pair, inputs: Any, arguments: dict[str, Any], mode: str, options: argparse.Namespace
) -> tuple[dict[str, Any], torch.Tensor] | None:
    """One text, timed; None where the method fails, which is said."""
    how = {"do_sample": True, "temperature": options.temperature, "top_k": 0} if mode != "greedy" else {}
    call = {"do_sample": False, "max_new_tokens": options.max_new_tokens} | how | arguments
    is_theirs = call.pop(THEIR_LOOP, False)
    torch.manual_seed(options.seed)
    drafter = arguments.get("assistant_model")
    if drafter is not None and drafter.config.learns_while_drafting:
        drafter.forget()  # it must not know the text from an earlier method
    try:
        with in_their_loop(pair) if is_theirs else contextlib.nullcontext():
            text, seconds = generate_timed(pair.target, inputs, **call)
    except Exception as error:  # a method of many must not end the others
        print(f"{call}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    count = num_written(text, pair.target.generation_config)
    figures: dict[str, Any] = {"new_tokens": count, "seconds": seconds, "tokens_per_second": count / seconds}
    if drafter is not None:
        figures |= {"num_rounds": drafter.stats.num_rounds, "tokens_per_forward": drafter.stats.tokens_per_forward}
    return figures, text


@contextlib.contextmanager
def in_their_loop(pair: Pair) -> Iterator[None]:
    """Let Transformers' own assisted loop draft with our candidate generator, one sequence at a time."""
    drafter = pair.drafter
    assert drafter is not None
    hf_domino.uninstall()
    pair.target._get_candidate_generator = lambda **call: hf_domino.DominoCandidateGenerator(
        drafter, pair.target, call["generation_config"], call["logits_processor"], call["model_kwargs"]
    )
    try:
        yield
    finally:
        del pair.target._get_candidate_generator
        hf_domino.install()


def num_written(text: torch.Tensor, generation_config: GenerationConfig) -> int:
    """How many of new tokens `[B, N]` are written: in each row those up to the first end of text."""
    ends = eos_ids_of(generation_config)
    return sum(len(cut_at_end(ids, ends).ids) for ids in text.tolist())


def table(rows: Sequence[Result]) -> str:
    """Rows for a terminal: tokens a second, and geometric means over plain generation and over its static form."""
    lines = []
    for mode in MODES:
        lines.append(f"{mode:<32}{'tokens/s':>9}{'over plain':>12}{'static plain':>14}{'a round':>9}{'equal':>10}")
        speeds = {
            method: {row["prompt"]: row["tokens_per_second"] for row in rows if _is(row, method, mode)}
            for method in dict.fromkeys(row.method for row in rows)
        }
        for method, speed in speeds.items():
            of_method = [row for row in rows if _is(row, method, mode)]
            if not of_method:
                continue
            ratios = [
                f"{geometric_mean(speed[prompt] / base[prompt] for prompt in speed):.2f} x" if base else "-"
                for base in (speeds[PLAIN], speeds.get("plain, static"))
            ]
            rounds = [row["tokens_per_forward"] for row in of_method if "tokens_per_forward" in row]
            brought = f"{sum(rounds) / len(rounds):.2f}" if rounds else "-"
            equal = f"{sum(row['equals_plain'] for row in of_method)} of {len(of_method)}"
            cells = f"{geometric_mean(speed.values()):>9.0f}{ratios[0]:>12}{ratios[1]:>14}{brought:>9}{equal:>10}"
            lines.append(f"{method:<32}{cells}")
    return "\n".join(lines)


def _is(row: Result, method: str, mode: str) -> bool:
    return row.method == method and row["mode"] == mode


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write rows and print them.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line, defaults to `sys.argv[1:]`.
    """
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", help="folder or Hub name (default: the bundled one)")
    add("--drafter", help="folder, Hub name or 'recycling' (default: the one beside the target, or published here)")
    add("--prompts", type=Path, help="records to go on with (default: those of the target)")
    add("--num-prompts", type=int, default=10, help="prompts, longest first")
    add("--batch-size", type=int, default=1, help="prompts at once")
    add("--max-new-tokens", type=int, default=128, help="tokens a text")
    add("--temperature", type=float, default=0.7, help="of the sampled half")
    add("--dtype", default="float32", help="dtype of both models")
    add("--device", default="cuda" if on_gpu else "cpu", help="device of both models")
    add("--seconds", type=float, default=600, help="begin no prompt after so long")
    add("--turns", type=Path, help="file by which commands beside each other take turns at timing")
    add("--without", nargs="*", default=[], help="methods to leave out")
    add("--seed", type=int, default=0, help="of sampled texts")
    add("--results", type=Path, default=Path("pairs.jsonl"), help="where rows are written")
    options = parser.parse_args(arguments)
    check_writable(options.results.parent, "the folder of --results")
    dtype = dtype_of(options.dtype)
    pair = load_pair(options.target, options.drafter, dtype=dtype, device=options.device)
    methods = {name: how for name, how in methods_of(pair).items() if name not in options.without}
    measure(pair, methods, options)
    print(table(read_results(options.results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
