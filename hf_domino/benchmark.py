"""`hf-domino bench`: measure every method in one process and write rows that say where they come from.

For each prompt (or batch of prompts) and repeat the methods run in turn, so that a slow minute of the machine hits all
of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_domino.pair import DTYPES, Pair, load_pair, read_prompts
from hf_domino.provenance import provenance
from hf_domino.report import METHODS, Row, fill_readme, read_rows, results_table, summarize

NGRAM = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino bench`."""
    add_pair_arguments(parser)
    parser.add_argument("--prompts", type=Path, help="JSONL of held-out prompts (default: prompts.jsonl of the pair)")
    parser.add_argument("--num-prompts", type=positive_int, default=50, help="use the first N prompts")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="prompts per call, padded on the left")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="tokens to generate per prompt")
    parser.add_argument(
        "--repeats", type=positive_int, default=3, help="timed runs per prompt and method; the median counts"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="temperature of the sampled half; 0 for greedy only"
    )
    parser.add_argument("--lookup-tokens", type=positive_int, default=10, help="tokens that prompt lookup proposes")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="dtype of all models")
    parser.add_argument("--device", default="cpu", help="device of all models")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampled half")
    parser.add_argument("--rows", type=Path, default=Path("results.jsonl"), help="where rows are written, or read from")
    parser.add_argument(
        "--readme", type=Path, help="measure nothing: write the table of --rows into this Markdown file"
    )


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
    if options.readme:
        fill_readme(options.readme, read_rows(options.rows))
        return 0
    set_up(options)
    pair = load_pair(options.pair, DTYPES[options.dtype], options.device)
    prompts = read_prompts(options.prompts or pair.folder / "prompts.jsonl")[: options.num_prompts]
    rows = measure(pair, prompts, options)
    options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(results_table(rows))
    greedy = [summarize(rows, method, "greedy") for method in _methods(pair, options)]
    equal = all(summary.num_equal == summary.num_prompts for summary in greedy)
    return 0 if equal or options.dtype != "float32" else 1


def measure(pair: Pair, prompts: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Row]:
    """Measure all methods on all prompts, greedy first.

    Args:
        pair (`Pair`): Target, tokenizer and drafters.
        prompts (`Sequence[dict]`): As read by [`hf_domino.pair.read_prompts`].
        options (`argparse.Namespace`): Flags of [`add_arguments`].

    Returns:
        `list[Row]`: One row per prompt, method and mode, with where and how it was measured.
    """
    fields = ("batch_size", "max_new_tokens", "repeats", "dtype", "seed")
    origin = {field: getattr(options, field) for field in fields} | {"pair": pair.name} | provenance(options.device)
    size = options.batch_size
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    _warm_up(pair, batches[0], options)
    rows = []
    for mode in ["greedy"] + ["sample"] * (options.temperature > 0):
        for index, batch in enumerate(batches):
            print(f"\r{mode} {index + 1}/{len(batches)} ", end="", file=sys.stderr, flush=True)
            rows += [row | origin for row in _measure_batch(pair, index, batch, mode, options)]
    print(file=sys.stderr)
    return rows


def _tokenize(pair: Pair, batch: Sequence[dict[str, Any]]) -> Any:
    texts = [prompt["text"] for prompt in batch]
    return pair.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(pair.target.device)


def _warm_up(pair: Pair, batch: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    inputs = _tokenize(pair, batch)
    for arguments in _methods(pair, options).values():
        for _ in range(2):
            generate_timed(pair.target, inputs, max_new_tokens=16, do_sample=False, **arguments)


def _measure_batch(
    pair: Pair, index: int, batch: Sequence[dict[str, Any]], mode: str, options: argparse.Namespace
) -> Iterator[Row]:
    inputs = _tokenize(pair, batch)
    law: dict[str, Any] = {"do_sample": False}
    if mode == "sample":
        law = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    methods = _methods(pair, options)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    tokens: dict[str, torch.Tensor] = {}
    for _ in range(options.repeats):
        for method, arguments in methods.items():
            torch.manual_seed(options.seed + index)
            tokens[method], elapsed = generate_timed(
                pair.target, inputs, max_new_tokens=options.max_new_tokens, **law, **arguments
            )
            seconds[method].append(elapsed)
    for method, arguments in methods.items():
        rounds = arguments["assistant_model"].stats.rows if "assistant_model" in arguments else []
        lengths = [length for row in rounds for length in row]
        texts = [_until_end(row, pair.target.generation_config.eos_token_id) for row in tokens[method].tolist()]
        count = sum(map(len, texts))
        yield {
            "method": method,
            "mode": mode,
            "temperature": law.get("temperature", 0.0),
            "prompt": index,
            "sources": [[prompt.get(field) for field in ("module", "offset", "sha256")] for prompt in batch],
            "new_tokens": count,
            "seconds": statistics.median(seconds[method]),
            "tokens_per_second": count / statistics.median(seconds[method]),
            "num_rounds": len(lengths),
            "acceptance_length": statistics.fmean(lengths) if lengths else None,
            "distinct_4gram": statistics.fmean(map(distinct_ngram_ratio, texts)),
            "equals_plain": torch.equal(tokens[method], tokens["plain"]) if mode == "greedy" else None,
        }


def _until_end(tokens: list[int], end_of_text: int | list[int] | None) -> list[int]:
    """A row up to its first end-of-text token, without the padding behind it."""
    ends = end_of_text if isinstance(end_of_text, list) else [end_of_text]
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]


def _methods(pair: Pair, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What each method adds to a plain `generate` call."""
    methods: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt_lookup": {"prompt_lookup_num_tokens": options.lookup_tokens},
        "dflash": {"assistant_model": pair.twin},
        "domino": {"assistant_model": pair.drafter},
    }
    missing = {"dflash"} if pair.twin is None else set()
    if options.batch_size > 1:
        missing.add("prompt_lookup")  # Transformers decodes it one sequence at a time
    return {method: methods[method] for method in METHODS if method not in missing}


def generate_timed(target: Any, inputs: Any, **arguments: Any) -> tuple[torch.Tensor, float]:
    """Generate once and take the time.

    Args:
        target (`PreTrainedModel`): The target.
        inputs (`BatchEncoding`): Tokenized prompts, padded on the left.
        arguments: Passed on to `generate`.

    Returns:
        `tuple[torch.Tensor, float]`: New token ids `[batch, num_new_tokens]`, and seconds from call to return.
    """
    _synchronize(target.device)
    start = time.perf_counter()
    output = target.generate(**inputs, **arguments)
    _synchronize(target.device)
    return output[:, inputs["input_ids"].shape[1] :], time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distinct_ngram_ratio(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams of a text that are new; text that loops is near 0, and 1.0 is no repetition at all.

    Args:
        tokens (`Sequence[int]`): Token ids.
        n (`int`, *optional*, defaults to 4): Length of an n-gram.

    Example:
    ```python
    >>> from hf_domino.benchmark import distinct_ngram_ratio
    >>> distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4])
    0.8

    ```
    """
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
