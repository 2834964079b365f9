"""Caches of fixed shape for one sequence: the target's, and that of the drafter's context.

What is valid in them is a length on the device, not a shape. A forward writes behind it and never moves it, so that a
block that is not accepted needs no rewinding, and a captured graph may be replayed at any length.

Shapes: A key/value heads, S capacity, C new context positions, Q block positions, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_domino.decoding.caches import PLACEHOLDERS
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache

# Sliding-window layers keep all positions here: one that keeps its window only cannot step back.
FIXABLE_LAYERS = (StaticLayer, StaticSlidingWindowLayer, *PLACEHOLDERS)


def unfixable(cache: Any) -> str | None:
    """Name of a kind of layer that has no fixed-shape counterpart here, of those of a static cache; None without."""
    return next((type(layer).__name__ for layer in cache.layers if type(layer) not in FIXABLE_LAYERS), None)


class FixedLayer(StaticLayer):
    """A layer that writes behind a length it shares with the others, and leaves the length alone.

    Args:
        capacity (`int`): Positions (S).
        length (`torch.Tensor`): Valid positions, `[]` int64 on the layer's device.
    """

    def __init__(self, capacity: int, length: torch.Tensor):
        super().__init__(max_cache_len=capacity)
        self.cumulative_length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers, such that they can be written to in any autograd mode."""
        with torch.inference_mode(False):
            super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values `[1, A, C, D]` behind the length; returns the buffers `[1, A, S, D]`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.cumulative_length + torch.arange(key_states.shape[2], device=self.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing: what is behind the length is not read."""


class FixedCache(Cache):
    """The target's cache of one sequence, all layers as long as the longest text.

    Args:
        like (`Cache`): A static cache of layers of `FIXABLE_LAYERS`, for their kinds.
        capacity (`int`): Positions (S).
        device (`torch.device`): Where the target is.
    """

    _is_user_defined = False

    def __init__(self, like: Cache, capacity: int, device: torch.device):
        with torch.inference_mode(False):
            self.length = torch.zeros((), dtype=torch.long, device=device)
        super().__init__(
            layers=[
                type(layer)() if isinstance(layer, PLACEHOLDERS) else FixedLayer(capacity, self.length)
                for layer in like.layers
            ]
        )
        self._carried: list[torch.Tensor] = []

    @torch.no_grad()
    def clear(self) -> None:
        """Make it empty. Zeros, so that nothing an earlier text left can spoil a weighted sum."""
        self.length.zero_()
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys.zero_()
                layer.values.zero_()

    def reserve(self, count: int) -> None:
        """Make room to carry so many positions in."""
        if not self._carried:
            with torch.inference_mode(False):
                self._carried = [torch.empty_like(states[:, :, :count]) for states in self._states()]

    def take(self, path: torch.Tensor) -> None:
        """Copy what stands at some places `[1, C]` behind the length; C is what there is room for."""
        for states, carried in zip(self._states(), self._carried, strict=True):
            torch.index_select(states, 2, self.length + path[0], out=carried)

    def put(self) -> None:
        """Write what was taken right behind the length: apart from taking, so that each can be run again."""
        for states, carried in zip(self._states(), self._carried, strict=True):
            states.index_copy_(2, self.length + torch.arange(carried.shape[2], device=self.length.device), carried)

    def _states(self) -> list[torch.Tensor]:
        """Keys and values of all layers that have any."""
        return [states for layer in self.layers if layer.keys is not None for states in (layer.keys, layer.values)]

    def to_dynamic(self, config: Any) -> DynamicCache:
        """A copy that grows, to go on from with the target of this configuration."""
        cache, length = DynamicCache(config=config), int(self.length)
        for index, layer in enumerate(self.layers):
            if layer.keys is not None:
                cache.update(layer.keys[:, :, :length], layer.values[:, :, :length], index)
        return cache


class FixedContext:
    """Keys and values of the context of one sequence, as [`ContextCache`] keeps them, in buffers of fixed shape.

    Slots are absolute positions. The block stands behind the context's last slot, where no context comes.

    Args:
        drafter ([`DominoDraftModel`]): For the shapes of its context, and where that is.
        capacity (`int`): Context positions (S).
    """

    def __init__(self, drafter: DominoDraftModel, capacity: int):
        self.capacity, config, device = capacity, drafter.config, drafter.device
        num_slots = capacity + config.block_size
        size = (config.num_hidden_layers, 1, config.num_key_value_heads, num_slots, config.head_dim)
        with torch.inference_mode(False):
            self._keys, self._values = (torch.zeros(size, dtype=drafter.dtype, device=device) for _ in range(2))
            self.start, self.length = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        self._length = 0

    def announce(self, count: int) -> None:
        """The next new context starts behind all there is, and its first `count` positions are valid."""
        self.start.fill_(self._length)
        self._length += count
        self.length.fill_(self._length)

    def begin(self, batch_size: int, num_positions: int, counts: Any) -> torch.Tensor:
        """Which slots a block may look at, `[1, S]` bool."""
        return (torch.arange(self.capacity, device=self.length.device) < self.length)[None]

    def window(self, size: int) -> tuple[torch.Tensor, range]:
        """Its length `[1]` and all slots: shapes do not depend on the length; see [`ContextCache.window`]."""
        return self.length[None], range(self.capacity)

    def join(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new context and, behind the last slot, the block; see [`ContextCache.join`].

        Args:
            layer_index (`int`): Which drafter layer.
            keys (`torch.Tensor`): New context, then the block, `[1, A, C + Q, D]`.
            values (`torch.Tensor`): Likewise.
            length (`int`): Block positions (Q).
            first (`int`, *optional*, defaults to 0): Slot to begin with.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Keys and values `[1, A, S + Q, D]`.
        """
        count = keys.shape[2] - length
        slots = self.start + torch.arange(count, device=keys.device)
        results = []
        for buffer, new in ((self._keys[layer_index], keys), (self._values[layer_index], values)):
            buffer.index_copy_(2, slots, new[:, :, :count])
            buffer[:, :, self.capacity : self.capacity + length] = new[:, :, count:]
            results.append(buffer[:, :, first : self.capacity + length])
        return results[0], results[1]

    def advance(self) -> None:
        """Do nothing: [`~FixedContext.announce`] has moved the length."""

    @torch.no_grad()
    def clear(self) -> None:
        """Make it empty."""
        self._length = 0
        for tensor in (self._keys, self._values, self.start, self.length):
            tensor.zero_()

    def to_dynamic(self) -> ContextCache:
        """A copy that grows."""
        copy, length = ContextCache(len(self._keys)), self._length
        copy.begin(1, length, None)
        for index, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            copy.append(index, keys[:, :, :length], values[:, :, :length])
        copy.advance()
        return copy
