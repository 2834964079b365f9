"""Stages of a recipe that run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def torchrun(processes: int, module: str, *arguments: str) -> None:
    """Run a module in several processes by torchrun, each on one thread.

    Args:
        processes (`int`): How many.
        module (`str`): What `python -m` would run.
        arguments (`str`): Its command line.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-m", module, *arguments], check=True, env=environment)
