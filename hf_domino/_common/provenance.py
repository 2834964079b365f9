"""Where a measurement comes from: what every published row carries."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_domino._common.version import __version__

NOT_RECORDED = "not recorded"  # outside a checkout


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Record hardware, threads, versions, commit and date of a measurement.

    Example:
    ```python
    >>> from hf_domino._common.provenance import provenance
    >>> sorted(provenance())
    ['commit', 'cores', 'date', 'hardware', 'hf_domino', 'python', 'threads', 'torch', 'transformers']

    ```
    """
    return {
        "hardware": _hardware(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_domino": __version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name != "unknown"), platform.processor() or platform.machine())


def _commit() -> str:
    """Find the commit of the checkout, with `-dirty` where the package differs."""
    folder = Path(__file__).parents[1]
    with suppress(FileNotFoundError):  # where there is no git
        # Of another repository, whose environment the package is installed in, HEAD has no such folder.
        head, status = (
            subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
            for command in (("rev-parse", "HEAD", "HEAD:./"), ("status", "--porcelain", "."))
        )
        if head.returncode == 0:
            return head.stdout.split()[0] + ("-dirty" if status.stdout.strip() else "")
    return NOT_RECORDED
