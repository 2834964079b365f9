"""Kernels on the machine at hand: natively on a GPU, else under Triton's interpreter (see `triton_interpreter`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if importlib.util.find_spec("triton") is None:  # it exists for Linux alone
    collect_ignore = ["test_choice.py", "test_gru.py", "test_branches.py", "test_native.py"]


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run in this process."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def nan_in_fresh_tensors() -> Iterator[None]:
    """Fill `torch.empty` with NaN or the largest integer, so that what a kernel forgets to write is seen."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
