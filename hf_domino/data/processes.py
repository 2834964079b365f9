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
    """Call a function with each argument, every time in a new process, and return the exit codes of the processes.

    The pools of `datasets` fork, and if a thread of torch holds a lock at that moment, the forked process can wait for
    it forever. Processes that multiprocessing spawns run the user's script again, which fails if the script has no
    `__main__` guard. What the processes print and what the function returns are dropped.

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
