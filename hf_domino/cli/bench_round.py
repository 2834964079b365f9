"""`hf-domino bench-round`: milliseconds of a whole round, with random weights of a chosen size."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from hf_domino.benchmark.round import FEW_ROUNDS, SHAPES, measure
from hf_domino.pair import DTYPES, check_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino bench-round`."""
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--shapes", choices=sorted(SHAPES), default="qwen3-8b" if on_gpu else "tiny", help="sizes of both models")
    add("--context", type=int, default=512, help="tokens of the prompt")
    add("--rounds", type=int, default=64, help="rounds of a text; the time of a shorter one is subtracted")
    add("--repeats", type=int, default=5, help="texts per method, in turn; the median counts")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16" if on_gpu else "float32", help="dtype of both models")
    add("--device", default="cuda" if on_gpu else "cpu", help="device of both models")
    add("--seed", type=int, default=0, help="seed of weights and prompt")
    add("--rows", type=Path, default=Path("rounds.jsonl"), help="where rows are written")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino bench-round`; returns 1 where a graph gives another text than its launches."""
    check_device(options.device)
    for field, least in (("context", 1), ("rounds", 4 * FEW_ROUNDS), ("repeats", 1)):
        if getattr(options, field) < least:
            raise ValueError(f"--{field} must be at least {least}, got {getattr(options, field)}.")
    rows = measure(options)
    options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{'ms a round':<18}{'median':>9}{'least':>9}{'most':>9}{'floor':>9}{'over floor':>12}")
    for row in rows:
        times = "".join(f"{row[name]:>9.3f}" for name in ("ms", "ms_least", "ms_most", "floor_ms"))
        print(f"{row['method']:<18}{times}{row['ms'] / row['floor_ms']:>11.2f}x")
    print("floor: bytes of the weights that a round reads over the bandwidth of a copy on this device")
    return 0 if rows[0]["is_equal"] else 1
