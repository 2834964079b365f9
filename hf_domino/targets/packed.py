"""Linear layers on a CPU, with weights that are packed once in the layout that oneDNN multiplies with.

PyTorch stores a weight by rows. For two or more positions, its product on a CPU first packs the whole weight into
another layout, at every call, so that verifying a few tokens can cost as much as several plain decode steps. Inside
[`packed_linears`], linear layers use copies that were packed before, if products with them are faster on this machine.

Products with packed copies also have rows of the same bits, whether a row is computed alone or in a block, which
`targets/row_bits.py` proves. A model is therefore packed as a whole or not at all: if a plain decode step multiplied
with the weights as they are, it could choose another token than a block does. That costs time only where a single row
is faster with the weight as it is.

Shapes: O outputs and I inputs of a linear layer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from hf_domino._common.blocks import Patch, Setting
from hf_domino._common.errors import invalid_argument
from hf_domino._common.forks import Lock
from hf_domino._common.memory import available_memory
from hf_domino._common.notices import logger, notice
from hf_domino.targets.attention import rowwise_attention
from hf_domino.targets.digest import digest_of
from hf_domino.targets.row_bits import AS_THEY_ARE, RowBits, prove

SETTING = "HF_DOMINO_PACKED"  # environment variable
AUTO, NEVER, ALWAYS = "auto", "0", "1"
CPU = torch.device("cpu")
DTYPES = torch.float32, torch.bfloat16, torch.float16
# Numbers of positions whose products are timed: a plain decode step, a block, and a prompt. A weight is packed for the
# sake of the first two, and products of more than MOST_OF_BLOCK positions use the copy if the last one is faster.
WIDTHS = 1, 9, 128
MOST_OF_BLOCK = 64
LEAST_GAIN = 1.1  # how many times as fast a product must be with the packed copy
# Elements of the part of a weight that is timed, for each width. A prompt's product is bound by arithmetic, so a small
# part says as much.
MOST_TIMED = 2**23, 2**23, 2**20
REPETITIONS = 3  # at most; the fastest counts, because other work on the machine only slows a product down
CLEAR_GAIN = 1.5  # a product that gained this much twice in a row is not repeated, because users wait for the timing
# Bytes. A product with a smaller weight takes microseconds, so it is not timed; and if all weights that gain are
# smaller than that together, the model spends its time elsewhere.
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

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether this is a copy of what a weight contains now."""
        is_alike = weight.shape == self.shape and weight.dtype is self.dtype
        return is_alike and torch.equal(self.digest, digest_of(weight))


@dataclass(frozen=True)
class _Gain:
    """What packing gains for weights of one shape."""

    is_faster: tuple[bool, ...]  # for each of WIDTHS
    saved: float  # seconds for each byte of the copy, in a block


@dataclass(frozen=True)
class _Use:
    """How the products of a call use the packed copy of a weight."""

    weight: torch.Tensor  # which has to stay alive, because its id finds this
    packed: Packed
    rows: RowBits
    is_prompt_faster: bool


_ALWAYS_FASTER = _Gain((True,) * len(WIDTHS), 0.0)
_UNTIMED = _Gain((False,) * len(WIDTHS), 0.0)

_wanted = Setting[dict[int, _Use]]("packed_linears", default={})
_plain_forward = nn.Linear.forward
_kept = WeakIdKeyDictionary()  # weight -> Packed, which goes with the weight
_left_out = WeakIdKeyDictionary()  # weight -> True if it was said that there is no memory for its copy
_gains: dict[tuple, _Gain] = {}  # by `_key`
_rows: dict[tuple, RowBits] = {}  # likewise


def _forget_copies() -> None:
    """Begin a new table, because the old one waits for ever for a thread that was reading it."""
    global _kept, _left_out
    _kept = WeakIdKeyDictionary()
    _left_out = WeakIdKeyDictionary()


_lock = Lock(_forget_copies)


@contextmanager
def packed_linears(*models: nn.Module, weights: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Run linear layers on a CPU with packed copies of their weights inside the `with` block, in the calling thread.

    Every assisted `generate` does this for its target and its drafter. Around a plain `generate`, it makes plain
    generation faster. The results differ from ordinary ones by rounding alone. Layers are left alone if they need
    gradients, if a compiler, a quantisation or an offloading hook runs them, or while `torch.backends.mkldnn` is
    disabled or a `TorchDispatchMode`, such as `FlopCounterMode`, is active. A model is left alone unless products with
    packed copies are at least a tenth faster for half of its weights, which is measured once for each shape.

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
    with rowwise_attention(CPU), _patch.applied(), _wanted.within(_wanted.get() | found):
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
        use = _wanted.get().get(id(weight))
        if use is not None and _fits(use, values):
            return _rowwise(values, use, bias)
    return F.linear(values, weight, bias)


@dataclass(frozen=True)
class LinearBits:
    """What the linear layers of a shape compute inside [`packed_linears`], bit for bit."""

    shape: tuple[int, ...]  # O, I
    dtype: torch.dtype
    is_packed: bool
    rows: RowBits  # of the products that are used, with packed copies or without
    # Whether a single row, and the rows of a prompt, also have the bits of `F.linear`.
    is_plain: bool

    @property
    def are_equal(self) -> bool:
        """Whether a row is computed with the same bits alone and in a block."""
        # Without a copy, a single row is not padded, and a block is not split.
        return self.rows.are_equal if self.is_packed else self.rows == AS_THEY_ARE


def linear_bits(model: nn.Module) -> list[LinearBits]:
    """Return what has been proved about each shape of PyTorch's own linear layers in a model.

    If `are_equal` for all, the text equals that of plain decoding with packed weights, and if `is_plain` for all, also
    that of ordinary plain decoding, as far as linear layers go. Otherwise, it is equal up to rounding.

    Args:
        model (`nn.Module`): The model. It is packed if that is worthwhile.
    """
    uses = _prepare([model], ())
    found = dict[tuple, LinearBits]()
    with torch.no_grad(), torch.inference_mode(False):
        for weight in _weights_of(model):
            use = uses.get(id(weight))
            key = (tuple(weight.shape), weight.dtype, use is not None)
            if key not in found:
                found[key] = _bits_of(weight.detach(), use)
    return list(found.values())


def _bits_of(weight: torch.Tensor, use: _Use | None) -> LinearBits:
    if use is None:
        rows = prove(lambda values, bias: F.linear(values, weight, bias), weight.shape[1], weight.dtype)
        return LinearBits(tuple(weight.shape), weight.dtype, False, rows, True)
    random = torch.Generator().manual_seed(0)
    values = torch.randn(WIDTHS[-1], weight.shape[1], generator=random, device="cpu").to(weight.dtype)
    bias = torch.randn(weight.shape[0], generator=random, device="cpu").to(weight.dtype)
    is_plain = all(
        torch.equal(F.linear(rows, weight, added), _rowwise(rows, use, added))
        for added in (None, bias)
        for rows in (values, *values.split(1))
    )
    return LinearBits(tuple(weight.shape), weight.dtype, True, use.rows, is_plain)


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


def _fits(use: _Use, values: torch.Tensor) -> bool:
    """Whether a product may use a packed copy."""
    if values.dtype is not use.packed.dtype or not values.is_cpu or not values.numel():
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not _is_enabled():
        return False
    return use.is_prompt_faster or values.numel() <= MOST_OF_BLOCK * values.shape[-1]


def _is_enabled() -> bool:
    """Whether the caller wants oneDNN, and no `TorchDispatchMode`, such as one that counts FLOPs, watches operators."""
    return torch.backends.mkldnn.enabled and not is_in_torch_dispatch_mode()  # type: ignore[return-value]


def _rowwise(values: torch.Tensor, use: _Use, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply so that no row's bits depend on how many rows there are, as far as that has been proved."""
    num_positions = values.numel() // values.shape[-1]
    copy = use.packed.copy
    is_single = num_positions == 1 and use.rows.is_single_padded
    if not is_single and (num_positions <= use.rows.most or num_positions > MOST_OF_BLOCK or not use.rows.are_equal):
        return _product(values, copy, bias)
    rows = values.reshape(num_positions, -1)
    if is_single:
        found = _product(rows.expand(2, -1), copy, bias)[:1]
    else:
        parts = rows.tensor_split(-(-num_positions // use.rows.most))
        found = torch.cat([_rowwise(part, use, bias) for part in parts])
    return found.view(*values.shape[:-1], -1)


def _prepare(models: Iterable[nn.Module], weights: Iterable[torch.Tensor]) -> dict[int, _Use]:
    """Return how to use up-to-date packed copies, by the id of their weight."""
    setting = os.environ.get(SETTING, AUTO)
    if setting not in (AUTO, NEVER, ALWAYS):
        remedy = "Unset it to pack where that is faster."
        raise invalid_argument(SETTING, f"{NEVER!r}, {ALWAYS!r} or {AUTO!r}", setting, remedy)
    if setting == NEVER or not torch.backends.mkldnn.is_available() or torch.compiler.is_compiling():
        return {}
    if not _is_enabled():
        return {}
    with torch.no_grad(), torch.inference_mode(False):
        gains = dict[int, tuple[torch.Tensor, _Gain]]()
        judged = set[int]()
        num_bytes = 0
        with _lock:
            # The first model by itself, so that an assisted call packs it if and only if a plain one does.
            for group in (*map(_weights_of, models), filter(_is_packable, weights)):
                own = {id(weight): weight for weight in group if id(weight) not in judged}
                judged |= own.keys()
                for weight, gain in _worthwhile(list(own.values()), num_bytes, is_forced=setting == ALWAYS):
                    gains[id(weight)] = weight, gain
                    num_bytes += weight.nbytes
        found = _up_to_date(list(gains.values()), is_forced=setting == ALWAYS)
        with _lock:
            return {
                id(weight): _Use(weight, packed, _rows_of(packed), gains[id(weight)][1].is_faster[-1])
                for weight, packed in found
            }


def _up_to_date(gains: list[tuple[torch.Tensor, _Gain]], is_forced: bool) -> list[tuple[torch.Tensor, Packed]]:
    """Return packed copies of what the weights contain now, of all weights for which there is memory."""
    with _lock:
        kept = [_kept.get(weight) for weight, _ in gains]
    # Reading takes milliseconds, so other calls may read or pack meanwhile.
    is_old = [packed is None or not packed.is_of(weight) for (weight, _), packed in zip(gains, kept, strict=True)]
    if any(is_old):
        with _lock:
            missing = []
            for position, (weight, gain) in enumerate(gains):
                packed = _kept.get(weight)
                if is_old[position] and packed is not kept[position] and packed is not None and packed.is_of(weight):
                    kept[position] = packed  # another thread has packed it meanwhile
                elif is_old[position]:
                    _kept.pop(weight, None)
                    kept[position] = None
                    missing.append((weight, gain))
            missing.sort(key=lambda each: each[1].saved, reverse=True)
            _pack([weight for weight, _ in missing], is_forced)
            kept = [packed or _kept.get(weight) for (weight, _), packed in zip(gains, kept, strict=True)]
    return [(weight, packed) for (weight, _), packed in zip(gains, kept, strict=True) if packed is not None]


def _worthwhile(weights: list[torch.Tensor], num_others: int, is_forced: bool) -> list[tuple[torch.Tensor, _Gain]]:
    """Return all weights of a model with what they gain, or none if not half of them gain or these are too small.

    Args:
        weights (`list[torch.Tensor]`): The weights.
        num_others (`int`): Bytes of other models' weights in the same call that gain.
        is_forced (`bool`): Whether to return all.
    """
    if is_forced:
        return [(weight, _ALWAYS_FASTER) for weight in weights]
    num_bytes = sum(weight.nbytes for weight in weights)
    if num_bytes + num_others < LEAST_OF_MODEL:
        return []
    gains = [(weight, _gain_of(weight) if weight.nbytes >= LEAST_WEIGHT else _UNTIMED) for weight in weights]
    num_faster = sum(weight.nbytes for weight, gain in gains if any(gain.is_faster[:2]))
    return gains if num_faster + num_others >= LEAST_OF_MODEL and 2 * num_faster >= num_bytes else []


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


def _pack(weights: list[torch.Tensor], is_forced: bool) -> None:
    """Pack weights in this order, as far as memory goes."""
    held = sum(packed.copy.nbytes for packed in _kept.values())
    room = SHARE_OF_MEMORY * (available_memory() + held) - held
    num_packed = 0
    num_bytes = 0
    left_out = 0  # bytes that no notice has named yet
    for weight in weights:
        if not is_forced and num_bytes + weight.nbytes > room:
            left_out += weight.nbytes if weight not in _left_out else 0
            _left_out[weight] = True
            continue
        _kept[weight] = Packed(_copy_of(weight), digest_of(weight), weight.shape, weight.dtype)
        num_packed += 1
        num_bytes += weight.nbytes
    if not num_packed and not left_out:
        return
    say = notice if num_bytes >= LEAST_NOTICED or left_out else logger.info
    say(
        f"hf_domino keeps packed copies of {num_packed} weights ({num_bytes / 1e9:.2f} GB), because this CPU "
        f"multiplies faster with them. hf_domino.release_workspaces() frees them, and {SETTING}={NEVER} turns this off."
        + (f" Weights of {left_out / 1e9:.2f} GB are not packed, to leave half of the free memory." if left_out else "")
    )


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


def _key(shape: torch.Size, dtype: torch.dtype) -> tuple:
    """Return what decides how oneDNN multiplies, and so how fast and in what order it adds up."""
    return tuple(shape), dtype, torch.get_num_threads(), torch.get_float32_matmul_precision()


def _rows_of(packed: Packed) -> RowBits:
    """Return which rows of products with a packed copy have the same bits, tried out once for each shape."""
    key = _key(packed.shape, packed.dtype)
    if key not in _rows:
        _rows[key] = prove(lambda values, bias: _product(values, packed.copy, bias), packed.shape[1], packed.dtype)
    return _rows[key]


def _gain_of(weight: torch.Tensor) -> _Gain:
    """Return what packing a weight of this shape gains, measured once."""
    key = _key(weight.shape, weight.dtype)
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
