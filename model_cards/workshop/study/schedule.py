"""Commands in processes of their own, a few at a time; none outlives the study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.processes import PATH

LINES_OF_A_FAILURE = 6


@dataclass(frozen=True)
class Command:
    """What one process does, where its output goes, and which commands must have succeeded before."""

    name: str
    arguments: list[str]
    log: Path
    after: tuple[str, ...] = field(default=())


def python(module: str, *arguments: str) -> list[str]:
    """A module, run by this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def run_all(
    commands: Sequence[Command], processes: int, threads: int, finished: Callable[[str], None] = lambda name: None
) -> dict[str, str]:
    """Run commands in their order, and go on where one fails; `finished` gets the name of each that succeeded.

    Returns:
        `dict[str, str]`: Name to the end of its log, of each that failed; those that waited for it are left out.
    """
    waiting, running = list(commands), _Running(processes, threads)
    failed: dict[str, str] = {}
    with running:
        while waiting or running.futures:
            unfinished = {command.name for command in (*waiting, *running.futures.values())}
            ready = [command for command in waiting if not unfinished & set(command.after)]
            for command in ready[: processes - len(running.futures)]:
                waiting.remove(command)
                if not failed.keys() & set(command.after):
                    running.start(command)
                else:
                    failed[command.name] = f"{' and '.join(command.after)} must succeed first."
            for command, code in running.next():
                if code:
                    failed[command.name] = _end_of(command.log)
                else:
                    finished(command.name)
    return failed


class _Running:
    """Processes and who waits for them; leaving the context ends what still runs."""

    def __init__(self, processes: int, threads: int):
        self.futures: dict[Future, Command] = {}
        self._pool = ThreadPoolExecutor(processes)
        self._processes: list[subprocess.Popen] = []
        self._environment = os.environ | PATH | {"OMP_NUM_THREADS": str(threads)}

    def __enter__(self) -> _Running:
        # SIGTERM ends Python at once by default, and would leave the processes behind.
        self._before: Any = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.terminate()
        self._pool.shutdown()
        signal.signal(signal.SIGTERM, self._before)

    def start(self, command: Command) -> None:
        """Start a process, with its output to its log."""
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("wb") as log:
            process = subprocess.Popen(command.arguments, stdout=log, stderr=subprocess.STDOUT, env=self._environment)
        self._processes.append(process)
        self.futures[self._pool.submit(process.wait)] = command

    def next(self) -> list[tuple[Command, int]]:
        """Wait until one ends; commands that ended with their exit codes."""
        if not self.futures:
            return []
        done, _ = wait(self.futures, return_when=FIRST_COMPLETED)
        return [(self.futures.pop(future), future.result()) for future in done]


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LINES_OF_A_FAILURE:])
