"""Processes of a recipe: how they are launched, and in which environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes.processes import HUGE_PAGES, run_command, torchrun


@pytest.fixture
def launched(monkeypatch):
    """Commands and environments that would have been run."""
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda command, check, env: calls.append((command, env)))
    for name in HUGE_PAGES:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_processes_have_a_thread_and_huge_pages_each(launched, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # what is set already stays
    torchrun(3, "hf_domino.cli", "train", "--seed=1")
    ((command, environment),) = launched
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[-4:] == ["-m", "hf_domino.cli", "train", "--seed=1"]
    expected = HUGE_PAGES | {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
    assert {name: environment[name] for name in expected} == expected


def test_a_command_of_its_own_has_the_callers_environment(launched, monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    run_command("module", "argument", environment={"ADDED": "2"})
    ((command, environment),) = launched
    assert command == [sys.executable, "-m", "module", "argument"]
    assert (environment["KEPT"], environment["ADDED"]) == ("1", "2")
    assert not set(HUGE_PAGES) & set(environment)
