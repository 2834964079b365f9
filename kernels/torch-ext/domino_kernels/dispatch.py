"""Chooses the implementation that runs: once per process, logged once; a `with` block can override the choice.

The choice comes from the environment variable `DOMINO_KERNELS_BACKEND`. It defaults to `"auto"`: Triton for CUDA
tensors if it can be imported, and PyTorch for all others.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # the kernels accumulate in fp32
BACKENDS = ("auto", "reference", "triton")
MAX_AUTO_ROWS = 8  # the kernels process rows one by one; for more rows, PyTorch's tensor cores are faster
ENVIRONMENT_VARIABLE = "DOMINO_KERNELS_BACKEND"

logger = logging.getLogger(__name__)
# The backend of each open `with` block, in a list that is emptied when the block ends: a generator can end it in
# another context, which cannot reset the variable of this one.
_overrides: ContextVar[tuple[list[str], ...]] = ContextVar("domino_kernels_backend", default=())


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Choose the implementation inside a `with` block, only for the calling thread or task.

    Args:
        backend (`str`): `"reference"` runs PyTorch. `"triton"` runs the kernels, or raises an error if they cannot run.
            `"auto"` runs the kernels for up to `MAX_AUTO_ROWS` rows of fp32, bf16 or fp16 on a CUDA device if Triton
            can be imported, and PyTorch otherwise.

    Raises:
        ValueError: If there is no such backend, or it is `"triton"` and Triton cannot be imported.

    Example:
    ```python
    >>> import torch, domino_kernels
    >>> with domino_kernels.use_backend("reference"):
    ...     domino_kernels.runs_triton(torch.zeros(1, 4))
    False

    ```
    """
    block = [_valid(backend, "backend")]
    _overrides.set((*filter(None, _overrides.get()), block))
    try:
        yield
    finally:
        block.clear()


def runs_triton(rows: torch.Tensor) -> bool:
    """Whether an operation would run the Triton kernels.

    Args:
        rows (`torch.Tensor`): One of the operation's inputs, with one entry per row in its first dimension,
            `[B, ...]`.

    Raises:
        ValueError: If the backend is `"triton"` and cannot run on the tensor's device.
    """
    chosen = [backend for block in _overrides.get() for backend in block]
    backend = chosen[-1] if chosen else _process_backend()
    if backend == "triton":
        if not (rows.is_cuda or _is_interpreted()):
            raise ValueError(
                f'backend "triton" needs tensors on a CUDA device, got {rows.device}. Move them, use backend "auto" or '
                '"reference", or set TRITON_INTERPRET=1 before Triton is imported to run the kernels on a CPU, slowly.'
            )
        return True
    fits = rows.is_cuda and rows.dtype in FLOATS and rows.shape[0] <= MAX_AUTO_ROWS
    return backend == "auto" and fits and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; this does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _process_backend() -> str:
    backend = _valid(os.environ.get(ENVIRONMENT_VARIABLE) or "auto", ENVIRONMENT_VARIABLE)
    if backend == "auto":
        runs = "Triton on CUDA tensors, PyTorch on others" if has_triton() else "PyTorch (Triton is not installed)"
    else:
        runs = {"reference": "PyTorch", "triton": "Triton"}[backend]
    logger.info("domino_kernels run %s; %s or domino_kernels.use_backend changes that.", runs, ENVIRONMENT_VARIABLE)
    return backend


@functools.cache
def _is_interpreted() -> bool:
    import triton

    from .triton_gru import _gru_units

    return not isinstance(_gru_units, triton.JITFunction)


def _valid(backend: str, field: str) -> str:
    if backend not in BACKENDS:
        raise ValueError(f'{field} must be one of {", ".join(BACKENDS)}, got "{backend}". "auto" is the default.')
    if backend == "triton" and not has_triton():
        raise ValueError(
            f'{field} is "triton", but Triton is not installed. Install it (`pip install triton`, on Linux) or use '
            '"auto" or "reference".'
        )
    return backend
