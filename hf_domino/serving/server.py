"""vLLM's server on loopback, started for a while."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

MODULE = "vllm.entrypoints.openai.api_server"  # `vllm serve` wants a package that is called vllm; CPU builds are not
MODEL = "target"  # what requests call it
MOST_SECONDS_TO_START = 900.0
ERROR = re.compile(r"(?:^|\] )(\w+Error): (.+)")  # behind the logger's place; a warning may name one in its text
PATIENCE = 15  # seconds that it has to end by itself
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}  # where it is not set


class Server:
    """A server that runs inside a `with` block, and not beyond it.

    Args:
        python (`str`): Python of the environment that vLLM is installed in.
        target (`str`): Folder or Hub name of the target.
        flags (`Sequence[str]`): Of vLLM's server, `--speculative-config` among them.
        log (`Path`): File for what it says.
    """

    def __init__(self, python: str, target: str, flags: Sequence[str], log: Path):
        self.url = f"http://127.0.0.1:{(port := _free_port())}"
        self.command = [python, "-m", MODULE, "--model", target, "--served-model-name", MODEL]
        self.command += ["--host", "127.0.0.1", "--port", str(port), *flags]
        self.log = log
        self._keeper: subprocess.Popen | None = None

    def __enter__(self) -> Server:
        """Start it and wait until it answers."""
        environment = ENVIRONMENT | dict(os.environ)
        with self.log.open("w") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "hf_domino.serving.keeper", str(PATIENCE), *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # an interrupt of ours is not the keeper's
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop it."""
        self.stop()

    def stop(self) -> None:
        """End the server with everything that it has started; a second time nothing is left to do."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + MOST_SECONDS_TO_START
        assert self._keeper is not None
        while self._keeper.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise ChildProcessError(f"vLLM's server did not start: {reason_in(self.log.read_text(errors='replace'))}")


def reason_in(log: str) -> str:
    """Why a server ended: the first error that its log has, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = filter(None, map(ERROR.search, lines))
    return next((f"{found[1]}: {found[2]}" for found in errors), lines[-1] if lines else "it said nothing")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
