"""Flags that several commands share. Like all modules of commands it imports nothing that takes a moment.

What a flag may be is spelled out where its home needs torch; a test compares the two.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

DTYPES = ("bfloat16", "float16", "float32")
METHODS = (
    "plain", "lean", "prompt_lookup", "assistant", "early_exit", "native_dflash", "dflash", "dflash_adaptive",
    "domino", "domino_adaptive",
)  # fmt: skip
ENGINES = ("sglang", "vllm", "dflash")
FORMATS = ("specforge", "speculators")
SHAPES = ("qwen3-8b", "tiny")


def positive_int(text: str) -> int:
    """Read a flag that must be at least 1; argparse reports what this raises."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_pair(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flag that chooses a target with its drafters."""
    parser.add_argument(
        "--pair", type=Path, help="folder of a target with NAME-domino beside it (default: bundled pair)"
    )


def add_threads(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the number of threads, for [`set_up`]."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    cores = int(asked) if asked.isdigit() and int(asked) else os.cpu_count() or 1
    parser.add_argument("--threads", type=positive_int, default=min(2, cores), help="CPU threads of torch")


def set_up(threads: int | None = None) -> None:
    """Set torch's threads, if given, and keep Transformers' progress bars out of the output."""
    import torch
    import transformers

    if threads is not None:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()


def default_device() -> str:
    """Where a command computes that was not told: on a GPU where torch can use one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
