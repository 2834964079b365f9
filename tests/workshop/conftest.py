"""What tests of the workshop's commands share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "model_cards" / "workshop" / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch) -> Callable[[str], ModuleType]:
    """A function that imports the module of a benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module
