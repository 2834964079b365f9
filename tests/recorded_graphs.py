"""What a CUDA graph does to the rounds, on a CPU: a stage is recorded once and its recording is played ever after.

A recording holds the operations with the very tensors they read and wrote, as a graph holds kernels with addresses. If
a stage had read a Python number that changes, a tensor that moves or a value back from the device, the recording would
play the past, or refuse to be made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from hf_domino.decoding.static import workspace
from hf_domino.decoding.static.graphs import StageGraph, StageGraphs

# On a GPU each of these waits for the device, or makes a shape of its contents, or copies from the host.
FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave.Tensor",
    "aten::lift_fresh",
}


@dataclass
class Recording(TorchDispatchMode):
    """Operations of one run, in order."""

    steps: list[tuple[Any, tuple, dict, list[torch.Tensor]]] = field(default_factory=list)
    number: torch.Tensor | None = None  # that the host named last

    def __post_init__(self):
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        # `x[...] = 0` is a fill on a GPU, but where it sets one element, which is a copy from the host.
        is_number = name == "aten::lift_fresh" and args[0].dim() == 0
        assert name not in FORBIDDEN or is_number, f"{name} inside a stage"
        assert name != "aten::copy_" or args[1] is not self.number, "a number is copied into one element inside a stage"
        outputs = func(*args, **(kwargs or {}))
        self.number = outputs if is_number else self.number
        read = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        is_view = all(tensor.untyped_storage().data_ptr() in read for tensor in _tensors(outputs))
        if func._schema.is_mutable or not is_view:  # a view recorded once stays one
            self.steps.append((func, args, kwargs or {}, _tensors(outputs)))
        return outputs

    def __enter__(self):
        self._tolist = torch.Tensor.tolist  # which is no operation on a CPU, and waits for a GPU
        torch.Tensor.tolist = _read_back
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self._tolist
        return super().__exit__(*error)

    def replay(self) -> None:
        """Run them again, each result written to where it was."""
        for func, args, kwargs, outputs in self.steps:
            results = func(*args, **kwargs)
            if isinstance(results, torch.Tensor):
                results = [results]
            for output, result in zip(outputs, results, strict=True):
                if output.data_ptr() != result.data_ptr():
                    output.copy_(result)


def _read_back(tensor: torch.Tensor) -> None:
    raise AssertionError("tolist inside a stage")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class RecordedGraphs(StageGraphs):
    """Records stages where the real ones would be captured."""

    made: list[RecordedGraphs] = []

    def __init__(self, device, enabled=None):
        super().__init__(device, enabled=True)
        self.num_captured = 0
        RecordedGraphs.made.append(self)

    @property
    def num_kept(self) -> int:
        """How many recordings are there."""
        return len(self._graphs)

    @property
    def names(self) -> set[str]:
        """Of the stages that are recorded."""
        keys = [found[0] for found in self._graphs]
        return {key[0] if isinstance(key, tuple) else key for key in keys}

    def capture(self, stage, inputs):
        self.num_captured += 1
        buffers = tuple(tensor.clone() for tensor in inputs)
        random_state = torch.get_rng_state()
        with _as_if_capturing(), Recording() as recording:
            outputs = stage(*buffers)
        torch.set_rng_state(random_state)
        return StageGraph(recording, buffers, outputs)


@contextlib.contextmanager
def _as_if_capturing() -> Iterator[None]:
    """Transformers asks this before it reads a mask back."""
    is_capturing = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing


@contextlib.contextmanager
def recorded_graphs() -> Iterator[list[RecordedGraphs]]:
    """Calls inside the block record and play their stages; yields the graphs of each workspace that was made."""
    workspace.release_workspaces()
    real, RecordedGraphs.made = workspace.StageGraphs, []
    workspace.StageGraphs = RecordedGraphs
    try:
        yield RecordedGraphs.made
    finally:
        workspace.StageGraphs = real
        workspace.release_workspaces()


def note_transfers(monkeypatch):
    """Return a list that grows by a name whenever the host reads a tensor or makes one."""
    found = []

    def noting(name, function):
        return lambda *args, **kwargs: found.append(name) or function(*args, **kwargs)

    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, noting(f"torch.{name}", getattr(torch, name)))
    return found
