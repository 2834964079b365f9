"""Record where a measurement comes from; every published result carries this record."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_domino._common.version import __version__

NOT_RECORDED = "not recorded"  # the commit of an installation outside a checkout


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Return the hardware, threads, versions, commit and date of a measurement.

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
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            name = line.partition(":")[2].strip()
            if line.startswith("model name") and name != "unknown":
                return name
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str:
    """Return the commit of the checkout, with `-dirty` if the package differs from it.

    Every checkpoint records it, so git is asked once.
    """
    folder = Path(__file__).parents[1]
    with suppress(FileNotFoundError):  # git is not installed
        # If the package is installed inside another repository, that repository's HEAD does not have this folder.
        head, status = (
            subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True)
            for command in (("rev-parse", "HEAD", "HEAD:./"), ("status", "--porcelain", "."))
        )
        if head.returncode == 0:
            suffix = "-dirty" if status.stdout.strip() else ""
            return head.stdout.split()[0] + suffix
    return NOT_RECORDED
