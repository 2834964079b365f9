"""Milliseconds of a verification forward on a CPU behind long contexts, with keys repeated for grouped heads and not.

    python model_cards/workshop/benchmarks/verification.py --rows verification.jsonl

The model has random weights and four query heads to a key head; its cache is filled with random keys and values. Both
ways run in turn in one process, so that what else the machine does falls on both. Logits are compared each time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from hf_domino._common.atomic_writes import check_writable, write_atomic
from hf_domino._common.cache_name import CACHE
from hf_domino._common.dtypes import dtype_of
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.benchmark.timing import timed
from hf_domino.evaluation.results import Result, to_lines
from hf_domino.targets.attention import rowwise_attention

SHAPES = {
    "small": {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16},
}
CPU = torch.device("cpu")
REPEATED, FOLDED = "keys repeated", "keys not repeated"
METHODS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    REPEATED: contextlib.nullcontext,
    FOLDED: partial(rowwise_attention, CPU),
}
# Of logits of about 1, whose sums are in another order.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}


def measure(options: argparse.Namespace) -> list[Result]:
    """Measure every dtype and context; two rows each.

    Args:
        options (`Namespace`): The flags of the command.
    """
    rows = []
    sizes = SHAPES[options.shapes]
    fixed = {"shapes": options.shapes, "width": options.width, "seed": options.seed, "repeats": options.repeats}
    made = provenance()
    for dtype in options.dtypes:
        torch.manual_seed(options.seed)
        tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **tokens, max_position_embeddings=max(options.contexts) + 64))
        model = model.to(dtype_of(dtype)).eval()
        for context in options.contexts:
            times = forward_times(model, context, options.width, options.repeats, TOLERANCES[dtype])
            repeated = statistics.median(times[REPEATED])
            for method, elapsed in times.items():
                median = statistics.median(elapsed)
                settings = {"dtype": dtype, "context": context} | fixed
                spread = {"ms": median, "ms_least": min(elapsed), "ms_most": max(elapsed)}
                rows.append(Result(method, settings, spread | {"times_faster": repeated / median}, made))
    return rows


@torch.inference_mode()
def forward_times(
    model: PreTrainedModel, context: int, width: int, repeats: int, tolerance: float
) -> dict[str, list[float]]:
    """Milliseconds of forwards over `width` positions behind so many, by method.

    Raises:
        AssertionError: If logits differ by more than the tolerance.
    """
    config = model.config
    cache = DynamicCache(config=config)
    for layer_index in range(config.num_hidden_layers):
        shape = 1, config.num_key_value_heads, context, config.head_dim
        cache.update(*torch.randn(2, *shape, dtype=model.dtype), layer_index)
    block = torch.randint(config.vocab_size, (1, width))
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    logits: dict[str, torch.Tensor] = {}
    for repeat in tqdm(range(repeats + 1), f"{model.dtype}, {context} tokens"):
        for method, attention in METHODS.items():
            with attention():
                outputs, seconds = timed(CPU, partial(model, block, **{CACHE: cache}))
            cache.crop(-width)
            logits[method] = outputs.logits
            if repeat:  # the first one allocates
                times[method].append(1e3 * seconds)
        difference = float((logits[REPEATED] - logits[FOLDED]).abs().max())
        assert difference <= tolerance, f"logits differ by {difference}"
    return times


def table(rows: Sequence[Result]) -> str:
    """Rows for a terminal."""
    lines = [f"{'dtype':<10}{'context':>8}  {'':<18}{'ms':>9}{'least':>9}{'most':>9}{'faster':>9}"]
    for row in rows:
        times = "".join(f"{row[name]:>9.1f}" for name in ("ms", "ms_least", "ms_most"))
        lines.append(f"{row['dtype']:<10}{row['context']:>8}  {row.method:<18}{times}{row['times_faster']:>8.2f}x")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write rows and print them.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line, defaults to `sys.argv[1:]`.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", choices=SHAPES, default="small", help="sizes of the model")
    add("--contexts", type=int, nargs="+", default=[1000, 4000, 8000], help="tokens in the cache")
    add("--width", type=int, default=9, help="positions of a forward")
    add("--repeats", type=int, default=20, help="timed forwards of each; the median counts")
    add("--dtypes", nargs="+", choices=TOLERANCES, default=list(TOLERANCES), help="dtypes of the model")
    add("--seed", type=int, default=0, help="seed of weights, cache and tokens")
    add("--rows", type=Path, default=Path("verification.jsonl"), help="where rows are written")
    options = parser.parse_args(arguments)
    check_writable(options.rows.parent, "the folder of --rows")
    rows = measure(options)
    write_atomic(options.rows, to_lines(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
