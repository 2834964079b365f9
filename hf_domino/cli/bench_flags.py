"""The flags of `hf-domino bench`, some of which `hf-domino demo` shares."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import transformers

from hf_domino.benchmark.methods import METHODS
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
        "--methods",
        type=lambda names: [name.strip() for name in names.split(",")],
        help=f"some of {','.join(METHODS)}; plain is always measured",
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
