"""Where a measured row comes from: machine, versions, commit, seed and date."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_domino

DATED = ("date",)  # may differ between rows of one run that was taken up again


def provenance(options: argparse.Namespace, pair_name: str, methods: Iterable[str]) -> dict[str, Any]:
    """Fields that every row of a run carries.

    Args:
        options (`argparse.Namespace`): Flags of `hf-domino bench`.
        pair_name (`str`): Name of the target.
        methods (`Iterable[str]`): What is measured, in turn.
    """
    return {
        "methods": list(methods),
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "lookup_tokens": options.lookup_tokens,
        "assistant": options.assistant and Path(options.assistant).name,
        "early_exit": options.early_exit,
        "dtype": options.dtype,
        "device": torch.device(options.device).type,
        "threads": options.threads,
        "seed": options.seed,
        "hardware": _hardware(options.device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_domino": hf_domino.__version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "pair": pair_name,
    }


def _hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name != "unknown"), platform.processor() or platform.machine())


def _commit() -> str:
    """Commit of the checkout, with `-dirty` where the package differs from it; `unknown` outside of one."""
    folder = Path(hf_domino.__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True)
    status = subprocess.run(["git", "status", "--porcelain", "."], cwd=folder, capture_output=True, text=True)
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "") if head.returncode == 0 else "unknown"
