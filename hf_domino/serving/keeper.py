"""Run a server while somebody holds our standard input open: `python -m hf_domino.serving.keeper SECONDS COMMAND ...`.

Whoever measures a server may be killed in the middle of a request. The system closes its end of the pipe then, and the
server is ended with everything that it has started: asked first, and made to after so many seconds. For that it stands
in a session of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

GLANCE = 0.2  # seconds between two looks at it


def keep(patience: float, command: Sequence[str]) -> int:
    """Run a command until it ends or standard input is closed, and leave nothing of it.

    Args:
        patience (`float`): Seconds that it has to end by itself.
        command (`Sequence[str]`): Program and arguments.

    Returns:
        `int`: What it returned.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _leave)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while server.poll() is None:
            readable, _, _ = select.select([sys.stdin], [], [], GLANCE)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
    finally:
        _end(server, patience)
    return server.returncode


def _leave(*_: Any) -> None:
    raise SystemExit(1)


def _end(server: subprocess.Popen, patience: float) -> None:
    """Ask the whole group to end, and make it."""
    deadline = time.monotonic() + patience
    _signal(server, signal.SIGTERM)
    while _is_there(server) and time.monotonic() < deadline:
        time.sleep(GLANCE)
    _signal(server, signal.SIGKILL)
    server.wait()


def _is_there(server: subprocess.Popen) -> bool:
    server.poll()  # or it would be there for ever, ended
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, 0)
        return True
    return False


def _signal(server: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(keep(float(sys.argv[1]), sys.argv[2:]))
