"""Processes of a study: a few at a time, in order, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from recipes.processes import PATH
from study.schedule import Command, run_all

APPEND = "import sys, os; open(sys.argv[1], 'a').write(sys.argv[2] + os.environ['OMP_NUM_THREADS'] + ' ')"


def command(folder, name, code=APPEND, after=()):
    """A small Python process that notes its name and threads."""
    return Command(name, [sys.executable, "-Sc", code, str(folder / "order"), name], folder / f"{name}.log", after)


def test_those_that_wait_come_after_and_failures_stop_nothing_else(tmp_path):
    fails = "import sys; print('reason', file=sys.stderr); sys.exit(3)"
    commands = [
        command(tmp_path, "bad", fails),
        command(tmp_path, "first"),
        command(tmp_path, "second", after=("first",)),
        command(tmp_path, "orphan", after=("bad",)),
    ]
    succeeded = []
    failed = run_all(commands, processes=2, threads=1, finished=succeeded.append)
    assert failed == {"bad": "reason", "orphan": "bad must succeed first."}
    assert succeeded == ["first", "second"]
    assert (tmp_path / "order").read_text() == "first1 second1 "


def test_no_process_outlives_a_study_that_is_ended(tmp_path):
    sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    script = (
        "import sys; from pathlib import Path; from study.schedule import *; note = sys.argv[1];"
        f"run_all([Command('s', [sys.executable, '-Sc', {sleeper!r}, note], Path(note + '.log'))], 1, 1)"
    )
    note = tmp_path / "pid"
    study = subprocess.Popen([sys.executable, "-c", script, str(note)], env=os.environ | PATH)
    while not (note.exists() and note.read_text()):
        time.sleep(0.02)
        assert study.poll() is None
    study.send_signal(signal.SIGTERM)
    assert study.wait(timeout=30) == 128 + signal.SIGTERM
    assert not _lives(int(note.read_text()))


def _lives(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
