"""The target's cache in fixed shape, and the buffers that it shares with the drafter's context (fixed_context.py).

Position i of a sequence is stored in slot i; left padding is not stored. A length per sequence, a tensor on the device,
says what is valid. A forward writes after the length but never moves it. So a rejected block needs no rewinding, and a
captured graph can be replayed at any length. When sequences end, the remaining ones move to the front of the same
buffers, and forwards read views of these.

Shapes: B sequences of the buffers, N of a forward, A key/value heads, S capacity, C new positions, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_domino.decoding.alignment import PLACEHOLDERS

# Here, sliding-window layers keep all positions: a layer that keeps only its window cannot be rewound.
FIXABLE_LAYERS = (StaticLayer, StaticSlidingWindowLayer, *PLACEHOLDERS)


def unfixable(cache: Any) -> str | None:
    """Name a layer type of a static cache that has no fixed-shape counterpart here; None if all have one."""
    return next((type(layer).__name__ for layer in cache.layers if type(layer) not in FIXABLE_LAYERS), None)


def places_of(starts: torch.Tensor, width: int, ring: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows `[N, 1]` and slots `[N, C]` of C new positions from each start `[N]` on, modulo `ring` if given."""
    slots = starts[:, None] + torch.arange(width, device=starts.device)
    if ring is not None:
        slots = slots % ring
    return torch.arange(len(starts), device=starts.device)[:, None], slots


def write(buffer: torch.Tensor, places: tuple[torch.Tensor, torch.Tensor], states: torch.Tensor) -> None:
    """Write states `[N, A, C, D]` into a buffer `[B, A, S, D]`, at the rows and slots from [`places_of`]."""
    buffer.transpose(1, 2).index_put_(places, states.transpose(1, 2))


def compact(tensors: Sequence[torch.Tensor], rows: Sequence[int], dim: int = 0) -> None:
    """Move these rows of tensors, given in ascending order, to the front, in place."""
    for target, source in enumerate(rows):
        if target != source:
            for tensor in tensors:
                tensor.select(dim, target).copy_(tensor.select(dim, source))


def set_first(tensor: torch.Tensor, values: Sequence[int]) -> None:
    """Set the first elements of a tensor on the device without synchronising."""
    if len(values) == 1:  # a fill needs no copy from the host
        tensor[:1].fill_(values[0])
    else:
        tensor[: len(values)].copy_(torch.tensor(values), non_blocking=True)


def resized(buffer: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return a buffer `[..., S, D]` with another number of slots."""
    size = buffer.shape[-2]
    if num_slots == size:
        return buffer
    with torch.inference_mode(False), torch.no_grad():
        if num_slots < size:
            fewer = buffer[..., :num_slots, :]
            try:
                return fewer.clone()  # a view would keep the memory of all slots
            except torch.OutOfMemoryError:
                return fewer
        larger = buffer.new_zeros(*buffer.shape[:-2], num_slots, buffer.shape[-1])
        larger[..., :size, :] = buffer
    return larger


class FixedLayer(StaticLayer):
    """A layer that writes after lengths that it shares with the other layers, and never changes the lengths.

    Args:
        capacity (`int`): Positions (S).
        lengths (`torch.Tensor`): Valid positions of each sequence, `[B]` int64 on the layer's device.
        first (`FixedLayer`, *optional*): The first layer, which computes where all layers write. Defaults to itself.
    """

    def __init__(self, capacity: int, lengths: torch.Tensor, first: FixedLayer | None = None):
        super().__init__(max_cache_len=capacity)
        self._lengths = lengths
        self._first = first
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None
        self.cumulative_length = lengths[0]  # Transformers reads this, for a single sequence

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers for all sequences so that they are writable in any autograd mode."""
        with torch.inference_mode(False):
            size = len(self._lengths), -1, -1, -1
            super().lazy_initialization(key_states[:1].expand(size), value_states[:1].expand(size))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values `[N, A, C, D]` after the lengths; returns the buffers `[N, A, S, D]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = len(key_states)
        places = self._places_of_forward(count, key_states.shape[2])
        write(self.keys, places, key_states)
        write(self.values, places, value_states)
        return self.keys[:count], self.values[:count]

    def resize(self, capacity: int) -> None:
        """Change the number of slots; the first ones keep their contents."""
        self.max_cache_len = capacity
        if self.is_initialized:
            for name in ("keys", "values"):
                setattr(self, name, resized(getattr(self, name), capacity))

    def _places_of_forward(self, count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute where a forward with this many sequences and new positions writes."""
        if torch.compiler.is_compiling():
            return places_of(self._lengths[:count], width)
        if self._first is not None and self._first._places is not None:
            rows, slots = self._first._places
            if slots.shape == (count, width) and slots.device == self.keys.device:
                return rows, slots
        places = places_of(self._lengths[:count], width)
        if self._first is None:
            self._places = places
        return places

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: nothing after the length is read."""


class FixedCache(Cache):
    """The target's cache, in which every layer has room for the longest text.

    Args:
        like (`Cache`): A static cache whose layers are of `FIXABLE_LAYERS`; gives the type of each layer.
        capacity (`int`): Positions (S).
        device (`torch.device`): Where the target is.
        num_rows (`int`, *optional*, defaults to 1): Sequences (B).
    """

    _is_user_defined = False

    def __init__(self, like: Cache, capacity: int, device: torch.device, num_rows: int = 1):
        with torch.inference_mode(False):
            self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        layers: list[Any] = []
        first: FixedLayer | None = None
        for layer in like.layers:
            if isinstance(layer, PLACEHOLDERS):
                layers.append(type(layer)())
            else:
                layers.append(FixedLayer(capacity, self.lengths, first))
                first = first or layers[-1]
        super().__init__(layers=layers)
        self.capacity = capacity
        self.is_batch = False  # whether the call has several sequences; Transformers cannot make their masks
        self._carried: list[torch.Tensor] = []

    @property
    def is_compileable(self) -> bool:
        """Whether Transformers makes masks of fixed shape for this cache."""
        return not self.is_batch and all(layer.is_compileable for layer in self.layers)

    @torch.no_grad()
    def clear(self) -> None:
        """Empty the cache and zero it, so that nothing from an earlier text can spoil a weighted sum."""
        for tensor in (self.lengths, *self._states()):
            tensor.zero_()

    @torch.no_grad()
    def select(self, rows: Sequence[int]) -> None:
        """Move these sequences, given in ascending order, to the front."""
        compact((self.lengths, *self._states()), rows)

    def resize(self, capacity: int) -> None:
        """Change the number of slots of all layers, one layer after the other to need little memory beside them."""
        self.capacity = capacity
        for layer in self.layers:
            if isinstance(layer, FixedLayer):
                layer.resize(capacity)

    def begin_forward(self) -> None:
        """Make the next forward compute again where it writes, even if its first layer is traced and stores nothing."""
        for layer in self.layers:
            layer._places = None

    def reserve(self, count: int) -> None:
        """Allocate room for [`~FixedCache.take`] to copy this many positions."""
        if not self._carried:
            with torch.inference_mode(False):
                self._carried = [torch.empty_like(states[:, :, :count]) for states in self._states()]

    def take(self, path: torch.Tensor) -> None:
        """Copy the states at places `[N, C]` after the lengths; C is the number of positions that were reserved."""
        count = len(path)
        slots = self.lengths[:count, None] + path
        rows = torch.arange(count, device=path.device)[:, None]
        for states, carried in zip(self._states(), self._carried, strict=True):
            carried[:count].transpose(1, 2).copy_(states.transpose(1, 2)[rows, slots])

    def put(self, path: torch.Tensor) -> None:
        """Write the copied states right after the lengths; separate from `take` so that each can be run again."""
        count = len(path)
        places = places_of(self.lengths[:count], path.shape[1])
        for states, carried in zip(self._states(), self._carried, strict=True):
            write(states, places, carried[:count])

    def _states(self) -> list[torch.Tensor]:
        """Return the keys and values of all layers that have any."""
        return [states for layer in self.layers if layer.keys is not None for states in (layer.keys, layer.values)]

    def num_slots(self) -> int:
        """The fewest slots that a layer's buffers have, which is less than the capacity if a hook has replaced some."""
        return min((states.shape[2] for states in self._states()), default=self.capacity)

    def num_bytes(self) -> int:
        """The memory of all keys and values."""
        return sum(states.nbytes for states in self._states())

    def to_dynamic(self, config: Any) -> DynamicCache:
        """Copy the first sequence to a cache that grows, for a target with this configuration."""
        cache = DynamicCache(config=config)
        length = int(self.lengths[0])
        for index, layer in enumerate(self.layers):
            if layer.keys is not None:
                cache.update(layer.keys[:1, :, :length], layer.values[:1, :, :length], index)
        return cache
