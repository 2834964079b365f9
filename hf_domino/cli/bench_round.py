"""`hf-domino bench-round`: milliseconds of a whole round, with random weights of a chosen size."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_domino._common.whole_files import check_writable, write_whole
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.flags import DTYPE, SHAPES, default_device, positive_int

EXAMPLES = """\
  hf-domino bench-round
  hf-domino bench-round --shapes qwen3-8b --dtype bfloat16 --device cuda
"""
ON_GPU, ON_CPU = ("qwen3-8b", "bfloat16"), ("tiny", "float32")  # shapes and dtype by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino bench-round`."""
    add = parser.add_argument
    add("--shapes", choices=SHAPES, help=f"sizes of both models (default: {ON_GPU[0]} on a GPU, else {ON_CPU[0]})")
    add("--context", type=positive_int, default=512, help="tokens of the prompt")
    add("--tree-size", type=positive_int, metavar="N", help="rounds verify trees of N nodes (default: chains)")
    add("--rounds", type=int, default=64, help="rounds of a text; the time of a shorter one is subtracted")
    add("--repeats", type=positive_int, default=5, help="texts per method; the median counts (launched on a GPU: 3)")
    add(
        "--dtype",
        **DTYPE,
        help=f"dtype of both models (default: {ON_GPU[1]} on a GPU, else {ON_CPU[1]})",
    )
    add("--device", help="device of both models (default: cuda where there is a GPU, else cpu)")
    add("--seed", type=int, default=0, help="seed of weights and prompt")
    add("--rows", type=Path, default=Path("rounds.jsonl"), help="where rows are written")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino bench-round`; returns 1 where a graph gives another text than its launches."""
    from hf_domino.evaluation.benchmark.round import FEW_ROUNDS, measure
    from hf_domino.pair import check_device

    options.device = options.device or default_device()
    check_device(options.device)
    shapes, dtype = ON_GPU if options.device.startswith("cuda") else ON_CPU
    options.shapes, options.dtype = options.shapes or shapes, options.dtype or dtype
    if options.rounds < 4 * FEW_ROUNDS:
        raise ValueError(f"--rounds must be at least {4 * FEW_ROUNDS}, got {options.rounds}.")
    check_writable(options.rows.parent, "the folder of --rows")
    rows = measure(options)
    write_whole(options.rows, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{'ms a round':<18}{'median':>9}{'least':>9}{'most':>9}{'floor':>9}{'over floor':>12}")
    for row in rows:
        times = "".join(f"{row[name]:>9.3f}" for name in ("ms", "ms_least", "ms_most", "floor_ms"))
        print(f"{row['method']:<18}{times}{row['ms'] / row['floor_ms']:>11.2f}x")
    print("floor: bytes of the weights that a round reads over the bandwidth of a copy on this device")
    return 0 if rows[0]["is_equal"] else FAILED_CHECK
