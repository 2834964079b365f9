"""A device other than a CPU, on a CPU: operations refuse tensors of both, as those of a GPU do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")  # the one that needs no driver
MAY_MIX = ("aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_")


class Elsewhere(torch.Tensor):
    """A tensor that says it is on that device.

    Args:
        here (`torch.Tensor`): What it holds, on the CPU.
    """

    is_meta = is_cpu = False  # it has values

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        options = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, here.size(), device=ELSEWHERE, **options)
        tensor.here = here
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self) -> list:
        return self.here.tolist()

    # torch would put lists of places there itself, where no mode sees it.
    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_listed(index))

    def __setitem__(self, index: Any, values: Any) -> None:
        super().__setitem__(_listed(index), values)


class _Mode(TorchDispatchMode):
    """Tensors can be made on the device, too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _listed(index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Elsewhere) else value


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    name, tensors = func._schema.name, [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    is_elsewhere = any(isinstance(x, Elsewhere) for x in tensors)
    if is_elsewhere and name not in MAY_MIX:
        assert all(isinstance(x, Elsewhere) or x.dim() == 0 for x in tensors), f"{name} on two devices"
    if name == "aten::copy_":
        is_elsewhere = isinstance(args[0], Elsewhere)
    elif (device := kwargs.get("device")) is not None:
        is_elsewhere, kwargs = torch.device(device) == ELSEWHERE, kwargs | {"device": "cpu"}
    result = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    for tensor in tensors:
        if result is _here(tensor):  # changed in place
            return tensor
    return tree_map(lambda x: Elsewhere(x) if is_elsewhere and isinstance(x, torch.Tensor) else x, result)


def move(model: nn.Module) -> None:
    """Put a model there."""
    for part in model.modules():
        for name, tensor in part._parameters.items():
            if tensor is not None:
                part._parameters[name] = nn.Parameter(Elsewhere(tensor.detach()), requires_grad=False)
        for name, tensor in part._buffers.items():
            part._buffers[name] = None if tensor is None else Elsewhere(tensor)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Calls inside the block can make tensors there, and draw as on the CPU."""
    make, real = torch.tensor, (torch.Generator, torch.get_device_module)

    def tensor(*args, device=None, **kwargs):
        made = make(*args, **kwargs)
        return made if device is None or torch.device(device) != ELSEWHERE else Elsewhere(made)

    torch.tensor = tensor
    torch.Generator = lambda device: real[0]()
    torch.get_device_module = lambda device: SimpleNamespace(
        default_generators=[torch.default_generator], current_device=lambda: 0
    )
    try:
        with _Mode():
            yield
    finally:
        torch.tensor, (torch.Generator, torch.get_device_module) = make, real
