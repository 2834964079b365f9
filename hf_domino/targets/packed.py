"""Linear layers on a CPU, with weights that are packed once in the layout that oneDNN multiplies with.

PyTorch stores a weight by rows. For two or more positions, its product on a CPU first packs the whole weight into
another layout, at every call, so that verifying a few tokens can cost as much as several plain decode steps. Inside
[`packed_linears`], linear layers use copies that were packed before, if products with them are faster on this machine.

Shapes: O outputs and I inputs of a linear layer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from hf_domino._common.blocks import Patch, Setting
from hf_domino._common.errors import invalid_argument
from hf_domino._common.forks import Lock
from hf_domino._common.notices import logger, notice
from hf_domino.targets.digest import digest_of

SETTING = "HF_DOMINO_PACKED"  # environment variable
AUTO, NEVER, ALWAYS = "auto", "0", "1"
DTYPES = torch.float32, torch.bfloat16, torch.float16
# Numbers of positions whose products are timed: a plain decode step, a block, and a prompt. A product is judged by the
# first of them if it has one position, by the second up to MOST_OF_BLOCK, and else by the last.
WIDTHS = 1, 9, 128
MOST_OF_BLOCK = 64
LEAST_GAIN = 1.1  # how many times as fast a product must be with the packed copy
# Elements of the part of a weight that is timed, for each width. A prompt's product is bound by arithmetic, so a small
# part says as much.
MOST_TIMED = 2**23, 2**23, 2**20
REPETITIONS = 3  # at most; the fastest counts, because other work on the machine only slows a product down
CLEAR_GAIN = 1.5  # a product that gained this much twice in a row is not repeated, because users wait for the timing
# Bytes. A product with a smaller weight takes microseconds, which are not worth a look-up; and if all weights that gain
# are smaller than that together, the model spends its time elsewhere.
LEAST_WEIGHT = 2**20
LEAST_OF_MODEL = 2**25
SHARE_OF_MEMORY = 0.5  # of what is free, for all copies together
LEAST_NOTICED = 2**28  # bytes; the memory of smaller copies is only logged at level info


@dataclass(frozen=True)
class Packed:
    """A packed copy of a weight, and what tells whether the weight has changed since."""

    copy: torch.Tensor  # in oneDNN's own layout
    digest: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    is_faster: tuple[bool, ...]  # for each of WIDTHS

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether this is a copy of what a weight contains now."""
        is_alike = weight.shape == self.shape and weight.dtype is self.dtype
        return is_alike and torch.equal(self.digest, digest_of(weight))


@dataclass(frozen=True)
class _Gain:
    """What packing gains for weights of one shape."""

    is_faster: tuple[bool, ...]  # for each of WIDTHS
    saved: float  # seconds for each byte of the copy, in a block


_ALWAYS_FASTER = _Gain((True,) * len(WIDTHS), 0.0)

_wanted = Setting[dict[int, tuple[torch.Tensor, Packed]]]("packed_linears", default={})
_plain_forward = nn.Linear.forward
_kept = WeakIdKeyDictionary()  # weight -> Packed, which goes with the weight
_gains: dict[tuple, _Gain] = {}  # by shape, dtype and number of threads


def _forget_copies() -> None:
    """Begin a new table, because the old one waits for ever for a thread that was reading it."""
    global _kept
    _kept = WeakIdKeyDictionary()


_lock = Lock(_forget_copies)


@contextmanager
def packed_linears(*models: nn.Module, weights: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Run linear layers on a CPU with packed copies of their weights inside the `with` block, in the calling thread.

    Every assisted `generate` does this for its target and its drafter. Around a plain `generate`, it makes plain
    generation faster. The results differ from ordinary ones by rounding alone. Layers are left alone if they need
    gradients, if a compiler, a quantisation or an offloading hook runs them, or if the packed copy is not at least a
    tenth faster, which is measured once for each shape.

    The copies take as much memory as the weights, at most half of what is free. They are kept for later calls until
    the weights are deleted or [`release_workspaces`] is called. At the beginning of each block, the weights are
    compared with what was packed (by a digest of their bits), and those that have changed are packed again. Do not
    change weights inside the block.

    The environment variable `HF_DOMINO_PACKED=0` turns all of this off; with `1`, all weights are packed, even if that
    is slower or takes more memory.

    Args:
        models (`nn.Module`): The models whose linear layers may use packed copies.
        weights (`Iterable[torch.Tensor]`, *optional*): Further weights `[O, I]` that [`linear`] may use packed copies
            of.

    Raises:
        ValueError: If `HF_DOMINO_PACKED` has another value.

    Example:
    ```python
    >>> import torch
    >>> import hf_domino
    >>> layer = torch.nn.Linear(64, 64)
    >>> with torch.no_grad(), hf_domino.packed_linears(layer):
    ...     result = layer(torch.ones(2, 64))

    ```
    """
    found = _prepare(models, weights)
    if not found:
        yield
        return
    with _patch.applied(), _wanted.within(_wanted.get() | found):
        yield


def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `F.linear`, with the packed copy of the weight if the calling thread uses one.

    Args:
        values (`torch.Tensor`): Input `[..., I]`.
        weight (`torch.Tensor`): Weight `[O, I]`.
        bias (`torch.Tensor`, *optional*): Bias `[O]`.
    """
    # A compiled model only calls this while it is traced, and the trace then serves all threads.
    if not torch.compiler.is_compiling():
        found = _wanted.get().get(id(weight))
        if found is not None and _fits(found[1], values):
            return _product(values, found[1].copy, bias)
    return F.linear(values, weight, bias)


def release_packed() -> None:
    """Free all packed copies that no running call uses."""
    with _lock:
        _kept.clear()


def _forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Take the place of `nn.Linear.forward` while a `with` block is open."""
    return linear(input, self.weight, self.bias)


def _replace_forward() -> None:
    if nn.Linear.forward is _plain_forward:
        nn.Linear.forward = _forward  # type: ignore[method-assign]


def _restore_forward() -> None:
    if nn.Linear.forward is _forward:
        nn.Linear.forward = _plain_forward  # type: ignore[method-assign]


_patch = Patch(_replace_forward, _restore_forward)


def _fits(packed: Packed, values: torch.Tensor) -> bool:
    """Whether a product may use a packed copy, and is faster with it."""
    if values.dtype is not packed.dtype or not values.is_cpu or not values.numel():
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    num_positions = values.numel() // values.shape[-1]
    if num_positions == 1:
        return packed.is_faster[0]
    return packed.is_faster[1 if num_positions <= MOST_OF_BLOCK else 2]


def _prepare(models: Iterable[nn.Module], weights: Iterable[torch.Tensor]) -> dict[int, tuple[torch.Tensor, Packed]]:
    """Return up-to-date packed copies by the id of their weight, which stays alive beside its copy."""
    setting = os.environ.get(SETTING, AUTO)
    if setting not in (AUTO, NEVER, ALWAYS):
        remedy = "Unset it to pack where that is faster."
        raise invalid_argument(SETTING, f"{NEVER!r}, {ALWAYS!r} or {AUTO!r}", setting, remedy)
    if setting == NEVER or not torch.backends.mkldnn.is_available() or torch.compiler.is_compiling():
        return {}
    candidates = {id(weight): weight for weight in weights if _is_packable(weight)}
    for model in models:
        candidates |= {id(weight): weight for weight in _weights_of(model)}
    found = dict[int, tuple[torch.Tensor, Packed]]()
    missing = list[tuple[torch.Tensor, _Gain]]()
    with _lock, torch.no_grad(), torch.inference_mode(False):
        if setting == ALWAYS:
            gains = [(weight, _ALWAYS_FASTER) for weight in candidates.values()]
        else:
            gains = _worthwhile(candidates.values())
        for weight, gain in gains:
            packed = _kept.get(weight)
            if packed is not None and packed.is_of(weight):
                found[id(weight)] = weight, packed
            else:
                _kept.pop(weight, None)
                missing.append((weight, gain))
        if missing:
            missing.sort(key=lambda each: each[1].saved, reverse=True)
            found |= _pack(missing, is_forced=setting == ALWAYS)
    return found


def _worthwhile(weights: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, _Gain]]:
    """Return the weights that are faster when packed, with what they gain; none if all together are too small."""
    large = [weight for weight in weights if weight.nbytes >= LEAST_WEIGHT]
    if sum(weight.nbytes for weight in large) < LEAST_OF_MODEL:
        return []
    gains = [(weight, _gain_of(weight)) for weight in large]
    faster = [(weight, gain) for weight, gain in gains if any(gain.is_faster)]
    if sum(weight.nbytes for weight, _ in faster) < LEAST_OF_MODEL:
        return []
    return faster


def _weights_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the weights that PyTorch's own linear layers multiply with; none if the model is compiled."""
    found = list[torch.Tensor]()
    for module in model.modules():
        forward = vars(module).get("forward")
        if module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable"):
            return
        # A subclass may have a forward of its own, and accelerate replaces the forward of an instance.
        if forward is None and type(module).forward in (_plain_forward, _forward):
            weight = module._parameters.get("weight")
            bias = module._parameters.get("bias")
            if weight is not None and _is_packable(weight) and (bias is None or bias.dtype is weight.dtype):
                found.append(weight)
    yield from found


def _is_packable(weight: torch.Tensor) -> bool:
    """Whether a weight is an ordinary tensor in the memory of the CPU, of a dtype that oneDNN may support."""
    is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.layout is torch.strided
    if not is_plain or weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return False
    return weight.dim() == 2 and weight.numel() > 0 and _supports(weight.dtype)


def _pack(missing: list[tuple[torch.Tensor, _Gain]], is_forced: bool) -> dict[int, tuple[torch.Tensor, Packed]]:
    """Pack weights in this order, as far as memory goes."""
    held = sum(packed.copy.nbytes for packed in _kept.values())
    room = SHARE_OF_MEMORY * (available_memory() + held) - held
    found = dict[int, tuple[torch.Tensor, Packed]]()
    num_bytes = 0
    left_out = 0
    for weight, gain in missing:
        if not is_forced and num_bytes + weight.nbytes > room:
            left_out += weight.nbytes
            continue
        packed = Packed(_copy_of(weight), digest_of(weight), weight.shape, weight.dtype, gain.is_faster)
        _kept[weight] = packed
        found[id(weight)] = weight, packed
        num_bytes += weight.nbytes
    say = notice if num_bytes >= LEAST_NOTICED or left_out else logger.info
    say(
        f"hf_domino keeps packed copies of {len(found)} weights ({num_bytes / 1e9:.2f} GB), because this CPU "
        f"multiplies faster with them. hf_domino.release_workspaces() frees them, and {SETTING}={NEVER} turns this off."
        + (f" Weights of {left_out / 1e9:.2f} GB are not packed, to leave half of the free memory." if left_out else "")
    )
    return found


def available_memory() -> int:
    """Return how many bytes of memory this process can still take, of the machine or of its container."""
    import psutil  # a requirement of accelerate

    free = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    with suppress(OSError, ValueError):  # where there is no such limit
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


@cache
def _supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of a dtype on this machine; narrow ones need a processor that does so."""
    weight = torch.ones(16, 16, dtype=dtype)
    try:
        _product(weight, _copy_of(weight), None)
    except (RuntimeError, AttributeError):  # AttributeError if PyTorch was built without these operators
        return False
    return True


def _copy_of(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), WIDTHS[1])


def _product(values: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(values, packed, bias, "none", [], "")


def _gain_of(weight: torch.Tensor) -> _Gain:
    """Return what packing a weight of this shape gains, measured once."""
    key = (tuple(weight.shape), weight.dtype, torch.get_num_threads())
    if key not in _gains:
        _gains[key] = _measure(weight.detach())
    return _gains[key]


def _measure(weight: torch.Tensor) -> _Gain:
    """Time products with the first rows of a weight, as they are and packed."""
    is_faster = []
    saved = []
    for width, most in zip(WIDTHS, MOST_TIMED, strict=True):
        part = weight[: max(1, most // weight.shape[1])]
        copy = _copy_of(part)
        values = torch.ones(1, width, weight.shape[1], dtype=weight.dtype)
        plain = packed = float("inf")
        num_clear = 0
        for _ in range(REPETITIONS + 1):  # the first one can be slow, and the best counts
            start = time.perf_counter()
            F.linear(values, part)
            middle = time.perf_counter()
            _product(values, copy, None)
            end = time.perf_counter()
            plain = min(plain, middle - start)
            packed = min(packed, end - middle)
            is_clear = middle - start > CLEAR_GAIN * (end - middle)
            num_clear = num_clear + 1 if is_clear else 0
            if num_clear == 2:
                break
        is_faster.append(plain > LEAST_GAIN * packed)
        saved.append((plain - packed) / part.nbytes)
    return _Gain(tuple(is_faster), saved[1])
