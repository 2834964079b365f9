"""Call a function in new processes, which neither fork this one nor run the user's script again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

CALL = "import sys, dill; function, argument = dill.load(sys.stdin.buffer); function(argument)"


def call_in_processes(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[int]:
    """Call a function of a module with each argument, each in a process of its own, and return their exit codes.

    The pools of `datasets` fork, and a fork of a process in which threads of torch hold a lock can wait for it for
    ever. Processes that multiprocessing spawns run the user's script again, which fails where it has no guard. Messages
    of the processes are dropped, and so is what the function returns.

    Args:
        function (`Callable`): A function of one argument, in a module that can be imported.
        arguments (`Sequence`): What to call it with: anything that `dill` can pickle.
    """
    import datasets
    import dill

    path = os.pathsep.join(folder for folder in sys.path if folder)
    environment = os.environ | {"PYTHONPATH": path, "HF_DATASETS_CACHE": str(datasets.config.HF_DATASETS_CACHE)}
    null = subprocess.DEVNULL
    with ExitStack() as running:
        processes = []
        for argument in arguments:
            pickled = running.enter_context(tempfile.TemporaryFile())
            dill.dump((function, argument), pickled)
            pickled.seek(0)
            command = [sys.executable, "-c", CALL]
            process = subprocess.Popen(command, stdin=pickled, stdout=null, stderr=null, env=environment)
            processes.append(running.enter_context(process))
            running.callback(process.kill)  # if this one is interrupted
        return [process.wait() for process in processes]
