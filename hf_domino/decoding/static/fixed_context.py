"""The drafter's context in buffers of fixed shape.

As in the target's cache (fixed_cache.py), lengths on the device say what is valid, so that a captured draft can be
replayed at any length. The host announces them before each draft.

Shapes: B sequences of the buffers, N of a draft, A key/value heads, S capacity, C new context positions, Q block
positions, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_domino.decoding.static.fixed_cache import compact, places_of, resized, set_first, write
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache, DraftContext


class FixedContext(DraftContext):
    """Keeps the keys and values of the context in buffers of fixed shape.

    Slots are absolute positions or, with `draft_window_size`, a ring that has room for the window and for what a round
    adds. The block is written after the last slot, where no context is ever stored.

    Args:
        drafter ([`DominoDraftModel`]): Gives the shapes of its context, and its device.
        capacity (`int`): Context positions (S).
        num_rows (`int`, *optional*, defaults to 1): Sequences (B).
    """

    def __init__(self, drafter: DominoDraftModel, capacity: int, num_rows: int = 1):
        config = drafter.config
        self._window = config.draft_window_size
        self._block_size = config.block_size
        self._num_new = config.num_draft_tokens + 1  # positions that a round commits at most
        self._largest = None if self._window is None else self._window + config.most_verified + 1  # size of the ring
        self.capacity = self._bounded(capacity)
        device = drafter.device
        num_slots = self.capacity + self._block_size
        # A method that learns while it drafts keeps no context.
        num_layers = 0 if config.learns_while_drafting else config.num_hidden_layers
        size = (num_layers, num_rows, config.num_key_value_heads, num_slots, config.head_dim)
        with torch.inference_mode(False):
            self._keys, self._values = (torch.zeros(size, dtype=drafter.dtype, device=device) for _ in range(2))
            self._starts, self._lengths = (torch.zeros(num_rows, dtype=torch.long, device=device) for _ in range(2))
        self.starts, self.ends = self._starts[:, None], self._lengths[:, None]  # [B, 1]
        self._end_of_first = 0  # the first sequence's length, on the host
        self._count = num_rows  # sequences of the current forward (N)

    def _bounded(self, capacity: int) -> int:
        if self._largest is None:
            return capacity
        return min(capacity, self._largest)

    def resize(self, capacity: int) -> None:
        """Change the number of slots. A ring that is not as large as it gets has not gone round yet."""
        self.capacity = self._bounded(capacity)
        num_slots = self.capacity + self._block_size
        self._keys = resized(self._keys, num_slots)
        self._values = resized(self._values, num_slots)

    def announce(self, starts: Sequence[int], ends: Sequence[int], device: torch.device) -> None:
        """Say which positions of each sequence are stored next; those after `ends` are written, too, but never read."""
        self._end_of_first = ends[0]
        set_first(self._starts, starts)
        set_first(self._lengths, ends)

    def needed(self, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Keep all states, so that what is stored has one shape."""
        return states

    def draft_inputs(
        self, anchors: torch.Tensor, states: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """Pass tensors alone; without states, as many as a round has, none of them valid."""
        if not states.shape[1]:
            states = states.new_zeros(len(states), self._num_new, states.shape[2])
        return anchors, states

    @torch.no_grad()
    def select(self, rows: Sequence[int]) -> None:
        """Move these sequences, given in ascending order, to the front."""
        compact((self._starts, self._lengths), rows)
        compact((self._keys, self._values), rows, dim=1)

    def begin(self, batch_size: int, num_positions: int, counts: Any) -> torch.Tensor:
        """Return which slots a block may attend to, `[N, S]` bool."""
        self._count = batch_size
        lengths = self._lengths[:batch_size, None]
        if self._window is None:
            return torch.arange(self.capacity, device=lengths.device) < lengths
        return self._ages() < lengths.clamp_max(self._window)

    def _ages(self) -> torch.Tensor:
        """Return how many later positions of its sequence follow the one in each slot of the ring, `[N, S]`."""
        slots = torch.arange(self.capacity, device=self._lengths.device)
        return (self._lengths[: self._count, None] - 1 - slots) % self.capacity

    def positions(self, slots: range, device: torch.device) -> torch.Tensor:
        """Return the positions in all slots: `[1, S]`, or `[N, S]` for a ring."""
        if self._window is None:
            return torch.arange(slots.start, slots.stop, device=device)[None]
        return (self._lengths[: self._count, None] - 1 - self._ages()).to(device)

    def window(self, size: int) -> tuple[torch.Tensor, range]:
        """Return lengths `[N]` and all slots, as shapes must not depend on lengths."""
        return self._lengths[: self._count], range(self.capacity)

    def join(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new context and, after the last slot, the block, which the next block overwrites."""
        num_rows = len(keys)
        count = keys.shape[2] - length
        buffers = self.append(layer_index, keys[:, :, :count], values[:, :, :count])
        results = []
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[:num_rows, :, self.capacity : self.capacity + length] = new[:, :, count:]
            results.append(buffer[:num_rows, :, first : self.capacity + length])
        return results[0], results[1]

    def append(self, layer_index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new context keys and values `[N, A, C, D]` of one layer; returns its buffers `[B, A, S + Q, D]`."""
        ring = None if self._window is None else self.capacity
        places = places_of(self._starts[: len(keys)], keys.shape[2], ring)
        buffers = self._keys[layer_index], self._values[layer_index]
        for buffer, new in zip(buffers, (keys, values), strict=True):
            write(buffer, places, new)
        return buffers

    def advance(self) -> None:
        """Do nothing: [`~FixedContext.announce`] has already moved the lengths."""

    @torch.no_grad()
    def clear(self) -> None:
        """Empty the context."""
        self._end_of_first = 0
        for tensor in (self._keys, self._values, self._starts, self._lengths):
            tensor.zero_()

    def num_bytes(self) -> int:
        """The memory of all keys and values."""
        return self._keys.nbytes + self._values.nbytes

    def to_dynamic(self) -> ContextCache:
        """Copy the first sequence to a context that grows."""
        copy = ContextCache(len(self._keys), self._window)
        length = self._end_of_first
        first = 0 if self._window is None else max(length - self._window, 0)
        slots = torch.arange(first, length, device=self._keys.device) % self.capacity
        copy.begin(1, len(slots), None)
        for index, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            copy.append(index, keys[:1, :, slots], values[:1, :, slots])
        copy.advance()
        return copy
