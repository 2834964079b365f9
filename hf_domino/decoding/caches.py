"""The caches that keep the target's keys and values between forwards and between calls.

[`TargetCache`] is the interface. `GrowingCache` is Transformers' own layers, from which rejected positions are dropped.
In a batch, each sequence drops its own after a round, and the batch is realigned (alignment.py).

The states of linear-attention and state-space layers cannot be cropped token by token. They are copied before a
verification forward. If a proposal is rejected, the copies are restored, and the committed tokens run through the
target once more.

Shapes: B sequences, S positions of a sequence, A heads, D head width, C accepted positions, T prompt tokens, M columns
of a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
)

from hf_domino._common.errors import invalid_argument
from hf_domino.decoding.alignment import PLACEHOLDERS, Alignment, unalignable

_STATES = (
    *("conv_states", "is_conv_states_initialized"),
    *("recurrent_states", "is_recurrent_states_initialized"),
    "has_previous_state",
)


def shortened_cache(expected: int, found: int) -> ValueError:
    """Create the error for a cache that lost positions, or slots, in a forward."""
    remedy = "A hook seems to shorten the cache, so rejected proposals could not be dropped; drop assistant_model, or "
    remedy += "remove the hook."
    return invalid_argument("the length of the target's cache after a forward", expected, found, remedy)


class TargetCache(ABC):
    """Holds the target's keys and values of the sequences that are still generated."""

    cache: Any  # what the target's forward takes, and what the caller gets in the end
    lengths: list[int]  # committed positions of each sequence in it, without left padding in a batch
    # Whether the padding of a batch is not stored, so that its blocks begin in different columns of the cache.
    starts_differ = False
    ends_with_block = True  # whether a block has the last columns of every layer

    @property
    @abstractmethod
    def num_columns(self) -> int:
        """How many columns of the cache are committed, including padding."""

    def unalignable(self) -> str | None:
        """The class name of a layer that cannot be realigned; None if all can be, or if nothing is realigned."""
        return None

    def record(self) -> None:  # noqa: B027
        """Keep from now on what is needed to drop positions again, until `end`."""

    def adopt(self, cache: Any) -> None:  # noqa: B027
        """Take the cache that the prompts' forward returned, if it is a new one."""

    @abstractmethod
    def settle(self, length: int) -> None:
        """Commit the first `length` positions, after a part of a prompt."""

    @abstractmethod
    def begin(self, lengths: list[int], mask: torch.Tensor | None, device: torch.device) -> None:
        """Commit the prompts, given the columns of each, their padding mask `[B, T]`, and the device of token ids."""

    def reserve(self, lengths: Sequence[int]) -> None:  # noqa: B027
        """Make room for the next block after texts of these lengths. A cache that grows needs none."""

    def open_block(self, num_checked: int) -> int:
        """Begin a forward over a block of this many positions; return how many positions a chain is padded to."""
        return num_checked

    @abstractmethod
    def starts(self, num_rows: int) -> torch.Tensor | int:
        """The lengths `[B, 1]` on the device, or the length of all sequences."""

    @abstractmethod
    def mask(self, width: int) -> torch.Tensor | None:
        """The padding mask `[B, S]` for a block of this many positions; None if there is no padding."""

    def check_forward(self, num_new: int) -> None:  # noqa: B027
        """Raise an error if the cache has lost positions in a forward over so many new ones."""

    @abstractmethod
    def follow(self, path: torch.Tensor, num_checked: int) -> None:
        """Move the positions of a path `[B, C]` to the front of the last block, which had `num_checked` positions."""

    @abstractmethod
    def keep(
        self, counts: Sequence[int], num_checked: int, rows: Sequence[int], run_again: Callable[[int], None]
    ) -> None:
        """Commit the first positions of the last block; drop the others, and all sequences that are not in `rows`.

        Args:
            counts (`Sequence[int]`): How many positions each sequence keeps.
            num_checked (`int`): How many positions the block had.
            rows (`Sequence[int]`): The sequences that stay, in ascending order.
            run_again (`Callable`): Runs the first positions of the block, given their number, through the target once
                more.
        """

    @abstractmethod
    def end(self, batch_size: int) -> None:
        """Make sure that `generate` can continue from a single sequence's cache, even if a round was interrupted."""


class GrowingCache(TargetCache):
    """Transformers' own layers, which grow with each forward; rejected positions are dropped from them.

    Args:
        cache (`Cache`): The target's cache.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self.lengths = []
        self._device = torch.device("cpu")
        self._mask: torch.Tensor | None = None  # [B, M], and the number of columns when it was made
        self._mask_columns = 0
        # How many positions are committed, and the recurrent states after them. A prefill or a round that is
        # interrupted leaves the cache as it was there.
        self._settled = int(cache.get_seq_length())
        self._may_recur = True  # until all layers exist, which may be after the first forward
        self._snapshot = StateSnapshot(cache)

    @property
    def num_columns(self) -> int:
        """How many columns are committed, including padding."""
        return self._settled

    def unalignable(self) -> str | None:
        """The class name of a layer that cannot be realigned; None if all can be."""
        return unalignable(self.cache)

    def record(self) -> None:
        """Let sliding-window layers keep the positions that they need to rewind."""
        activate_past_recording(self.cache)

    def adopt(self, cache: Any) -> None:
        """Take a new cache. Phi-3 creates one for long prompts."""
        if not self.cache.get_seq_length():
            self.cache = cache
            activate_past_recording(cache)

    def settle(self, length: int) -> None:
        """Keep the first `length` positions, which are committed."""
        snapshot = self._snapshot
        if self._may_recur:
            shorten_convolutions(self.cache)
            snapshot = StateSnapshot(self.cache)
        # The length is noted before the crop, so that `end` can complete a crop that is interrupted.
        self._settled = length
        self._snapshot = snapshot
        crop_attention(self.cache, length)  # even if it drops nothing, it shrinks sliding layers back to their window

    def begin(self, lengths: list[int], mask: torch.Tensor | None, device: torch.device) -> None:
        """Commit the prompts, and note how much of each is padding."""
        padding = [0] * len(lengths)
        if mask is not None:
            padding = mask.bool().int().argmax(dim=1).tolist()
        self.lengths = [length - count for length, count in zip(lengths, padding, strict=True)]
        self._device = device
        self._mask = mask
        self._mask_columns = lengths[0]
        self._may_recur = bool(recurrent_layers(self.cache))
        self.settle(lengths[0])

    def starts(self, num_rows: int) -> torch.Tensor | int:
        """The length of all sequences, or their lengths `[B, 1]` if they differ."""
        if min(self.lengths) == max(self.lengths):
            return self.lengths[0]
        return torch.tensor(self.lengths, device=self._device)[:, None]

    def mask(self, width: int) -> torch.Tensor | None:
        """The padding mask, extended to the end of the block."""
        if self._mask is None:
            return None
        return torch.nn.functional.pad(self._mask, (0, self._settled + width - self._mask_columns), value=1)

    def check_forward(self, num_new: int) -> None:
        """Raise an error if the cache does not hold all positions of the last forward."""
        expected = self._settled + num_new
        if (found := self.cache.get_seq_length()) != expected:
            raise shortened_cache(expected, found)

    def follow(self, path: torch.Tensor, num_checked: int) -> None:
        """Move the keys and values of an accepted path to the front of the block."""
        if path.is_cpu and torch.equal(path, torch.arange(path.shape[1]).expand_as(path)):
            return
        move_forward(self.cache, path, num_checked)

    def keep(
        self, counts: Sequence[int], num_checked: int, rows: Sequence[int], run_again: Callable[[int], None]
    ) -> None:
        """Rewind all sequences together if they keep equally many positions; otherwise realign them."""
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if len(rows) == len(counts) and min(counts) == max(counts):
            if self._may_recur and counts[0] < num_checked:
                self._snapshot.restore()
                crop_attention(self.cache, self._settled)
                run_again(counts[0])
            self.settle(self._settled + counts[0])
        elif rows:
            dropped = [num_checked - counts[row] for row in rows]
            self._align(Alignment(rows, dropped, [lengths[row] for row in rows]), num_checked)
        self.lengths = [lengths[row] for row in rows]

    def end(self, batch_size: int) -> None:
        """Drop what an interruption has left in the cache of a single sequence; empty the cache of a batch."""
        if batch_size > 1:  # sequences left at different times, so the cache no longer holds all of them
            empty(self.cache)
        else:
            self._snapshot.restore()
            drop_forward(self.cache, self._settled)
        end_past_recording(self.cache)

    def _align(self, alignment: Alignment, num_checked: int) -> None:
        """Move the positions that each sequence keeps to the right, until all sequences end in the same column."""
        real = alignment.padding_mask(self._device if self._mask is None else self._mask.device)
        given = self.mask(num_checked)
        self._mask = real if given is None else real.to(given.dtype) * alignment.align_positions(given)
        alignment.align_cache(self.cache)
        self._settled = self.cache.get_seq_length()
        self._mask_columns = self._settled


def recurrent_layers(cache: Any) -> list[Any]:
    """The layers of a cache that keep recurrent or convolution states."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, LinearAttentionCacheLayerMixin)]


def activate_past_recording(cache: Any) -> None:
    """Let sliding-window layers keep the positions that they need to rewind; recurrent layers use a snapshot."""
    cache.activate_past_recording()
    for layer in recurrent_layers(cache):
        if not isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def shorten_convolutions(cache: Any) -> None:
    """Keep of each convolution only the inputs that its next output needs, as in plain generation."""
    for layer in recurrent_layers(cache):
        if not layer.record_past:  # otherwise its attention records, and its convolutions keep all inputs meanwhile
            continue
        for index, states in layer.conv_states.items():
            if states is not None:
                excess = states.shape[-1] - layer.conv_kernel_size[index]
                layer.conv_states[index] = torch.nn.functional.pad(states, (-excess, 0))


def end_past_recording(cache: Any) -> None:
    """Let sliding-window layers keep only their window again, as in plain generation."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def crop_attention(cache: Any, length: int) -> None:
    """Keep the first `length` positions of all attention layers, and of the attention part of mixed layers."""
    for layer in cache.layers:
        kind = attention_class(layer)
        if kind is not None and layer.is_initialized:  # lengths can differ between layers if a forward was interrupted
            kind.crop(layer, -max(kind.get_seq_length(layer) - length, 0))  # sliding layers shrink to their window


def drop_forward(cache: Any, length: int) -> None:
    """Keep the first `length` positions, at which the cache was cropped last, whatever a forward has added since.

    The forward can have been interrupted inside a layer, whose keys then have another length than its values.
    """
    for layer in cache.layers:
        kind = attention_class(layer)
        if kind is None or not layer.is_initialized:
            continue
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            kind.crop(layer, -max(kind.get_seq_length(layer) - length, 0))
            continue
        kept = length
        if layer.is_sliding:
            kept = min(length, layer.sliding_window - 1)
            layer.cumulative_length = length
        if length:
            layer.keys = layer.keys[..., :kept, :]
            layer.values = layer.values[..., :kept, :]
        else:  # another call may fill it with another number of sequences
            layer.keys = layer.values = None
            layer.is_initialized = False


def move_forward(cache: Any, path: torch.Tensor, num_checked: int) -> None:
    """Among the last `num_checked` positions, move those on `path` `[B, C]` to the front, in place."""
    for layer in cache.layers:
        if isinstance(layer, PLACEHOLDERS) or layer.keys is None:
            continue
        start = layer.keys.shape[2] - num_checked
        index = path.to(layer.keys.device)
        for states in (layer.keys, layer.values):
            block = states[:, :, start:]
            if len(path) == 1:
                block[:, :, : path.shape[1]] = block.index_select(2, index[0])
            else:
                where = index[:, None, :, None].expand(-1, block.shape[1], -1, block.shape[3])
                block[:, :, : path.shape[1]] = block.gather(2, where)


def sliding_windows(cache: Any, text_config: Any) -> list[int | None]:
    """The sliding window of each of the target's attention layers; None for a layer that sees all positions.

    Args:
        cache (`Cache`): The target's cache.
        text_config (`PreTrainedConfig`): The configuration of its text model.
    """
    layers = [layer for layer in cache.layers if not isinstance(layer, PLACEHOLDERS)]
    windows = [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers]
    kinds = getattr(text_config, "layer_types", None) or []
    # The last layers of some targets keep no keys. They use those of the last layer of their type that keeps some.
    window_of = dict(zip(kinds, windows, strict=False))
    attending = [window for layer, window in zip(layers, windows, strict=True) if attention_class(layer) is not None]
    return attending + [window_of.get(kind) for kind in kinds[len(windows) :]]


def attention_class(layer: Any) -> Any:
    """The class that implements the keys and values of a layer; None if the layer has none."""
    if isinstance(layer, PLACEHOLDERS):
        return None
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return type(layer)
    kinds = (DynamicSlidingWindowLayer, DynamicLayer)
    return next((kind for kind in kinds if isinstance(layer, kind)), None)


class StateSnapshot:
    """Copies of all recurrent states of a cache, made when its positions are committed."""

    def __init__(self, cache: Any):
        self._saved = [
            (layer, {name: _clone(getattr(layer, name)) for name in _STATES if hasattr(layer, name)})
            for layer in recurrent_layers(cache)
        ]

    def restore(self) -> None:
        """Put copies of the states back."""
        # The snapshot stays intact, because the next forward can be interrupted and then needs it again.
        for layer, states in self._saved:
            for name, value in states.items():
                setattr(layer, name, _clone(value))


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value


def empty(cache: Cache) -> None:
    """Drop all positions of a cache of `ALIGNABLE_LAYERS`."""
    for layer in cache.layers:
        if isinstance(layer, PLACEHOLDERS):
            continue
        layer.keys = layer.values = None
        layer.is_initialized = False
        if layer.is_sliding:
            layer.cumulative_length = 0


def unrewindable(cache: Any) -> str | None:
    """The class name of a layer that cannot drop its last positions; None if all can, or take snapshots instead."""
    kinds = [(type(layer), layer.is_croppable) for layer in cache.layers if not _takes_snapshots(type(layer))]
    later = getattr(cache, "layer_class_to_replicate", None)  # of layers that the first forward makes
    if later is not None and not _takes_snapshots(later):
        kinds.append((later, later.is_croppable))
    return next((kind.__name__ for kind, can in kinds if not can or issubclass(kind, QuantizedLayer)), None)


def _takes_snapshots(kind: type) -> bool:
    return issubclass(kind, (LinearAttentionCacheLayerMixin, *PLACEHOLDERS))
