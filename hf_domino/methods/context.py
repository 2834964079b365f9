"""The context cache: keys and values of the context features, kept between rounds.

Shapes: B batch, C new context positions, L captured layers, H hidden size, S cached context length, Q block positions,
A key/value heads, D head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class NewContext(NamedTuple):
    """Context that the target has read since the last draft.

    Args:
        features (`torch.Tensor`, *optional*): Context features `[B, C, H]`, as `fuse_context` returns them.
        positions (`torch.Tensor`, *optional*): Their absolute positions `[B, C]`.
        counts (`Sequence[int]`, *optional*): How many of each sequence's C positions are valid, counted from the first;
            None for all.
    """

    features: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    counts: Sequence[int] | None = None


NO_CONTEXT = NewContext()
SPARE = 256  # extra positions to reserve when the first ones are stored
MAX_WAITING = 256  # how many positions rounds without drafts may collect before they are stored in a context that grows


class DraftContext(ABC):
    """Holds the keys and values of the context for each drafter layer; those of a block are not stored.

    [`ContextCache`] grows. With fixed shapes, `FixedContext` (`decoding/static/fixed_context.py`) takes its place.
    """

    first = 0  # the first slot that any sequence still sees
    max_waiting = 0  # how many positions may wait for the next draft, before those of another round are added
    # What is stored next, set by `announce`: the positions `[B, 1]` that it starts from and that follow it (buffers of
    # fixed shape can have more sequences), and how many positions it has in each sequence, if the host must know.
    starts: torch.Tensor
    ends: torch.Tensor
    new_counts: list[int] | None = None

    @abstractmethod
    def announce(self, starts: Sequence[int], ends: Sequence[int], device: torch.device) -> None:
        """Say which positions of each sequence are stored next: those from `starts` on and before `ends`, the anchor's.

        Args:
            starts (`Sequence[int]`): The first position of each sequence.
            ends (`Sequence[int]`): The position after its last one.
            device (`torch.device`): The drafter's device.
        """

    @abstractmethod
    def needed(self, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Cut hidden states `[B, C, L * H]` to what is stored, if the first `counts` of each sequence are valid."""

    @abstractmethod
    def draft_inputs(
        self, anchors: torch.Tensor, states: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """What a draft from the anchors `[B, 1]` reads.

        Args:
            anchors (`torch.Tensor`): The anchors.
            states (`torch.Tensor`): The hidden states to store before it, `[B, C, L * H]`; C can be 0.
            last_tokens (`Callable`, *optional*): Returns the last tokens of each sequence, given their number.

        Returns:
            `tuple`: The anchors, the states or None, and `last_tokens` where a draft can call it.
        """

    @abstractmethod
    def begin(self, batch_size: int, num_positions: int, counts: Sequence[int] | None) -> torch.Tensor | None:
        """Announce the positions that every layer is about to store.

        Args:
            batch_size (`int`): B.
            num_positions (`int`): New positions (C).
            counts (`Sequence[int]`, *optional*): How many of them are valid in each sequence, counted from the first;
                None for all.

        Returns:
            `torch.Tensor`, *optional*: Which slots, counted from `first`, each sequence will see, `[B, S]` bool; None
            if every sequence sees all of them.
        """

    @abstractmethod
    def window(self, size: int) -> tuple[torch.Tensor, range]:
        """Lengths `[B]` including the announced positions, and the range of slots that covers every query's window."""

    @abstractmethod
    def positions(self, slots: range, device: torch.device) -> torch.Tensor:
        """Return the positions in these slots, `[1, S]` or `[B, S]`, on the same scale as the lengths."""

    @abstractmethod
    def append(self, layer_index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new context keys and values `[B, A, C, D]` of one layer, and return all of them `[B, A, S, D]`."""

    @abstractmethod
    def join(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new context of one layer and append the block, which does not stay, to all of it.

        Args:
            layer_index (`int`): Index of the drafter layer.
            keys (`torch.Tensor`): Keys of the new context, then of the block, `[B, A, C + Q, D]`.
            values (`torch.Tensor`): Values in the same order and shape.
            length (`int`): Block positions (Q).
            first (`int`, *optional*, defaults to 0): Slot to start at; earlier ones are left out.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Keys and values of all context and the block, `[B, A, S + Q, D]`.
        """

    @abstractmethod
    def advance(self) -> None:
        """Add the positions announced last to the lengths, after all layers have stored theirs."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""

    @abstractmethod
    def to_dynamic(self) -> ContextCache:
        """A context that grows, with what is stored for the first sequence."""


class ContextCache(DraftContext):
    """Keeps the keys and values of the context between rounds in buffers that grow.

    Every sequence has its own length. New positions are written after the last valid one and overwrite what an earlier
    round left there. The buffers grow by half, so that most rounds append in place without copying.

    Args:
        num_layers (`int`): Drafter layers.
        window (`int`, *optional*): How many of the last positions a block sees; None for all. Older ones are dropped.
    """

    max_waiting = MAX_WAITING
    new_counts: list[int]

    def __init__(self, num_layers: int, window: int | None = None):
        self._window = window
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._lengths: list[int] = []  # per sequence; empty until positions are stored
        self._filled: list[int] = []  # lengths with what this forward stores
        self.starts = self.ends = torch.empty(0, 1)
        self.new_counts = []

    @property
    def lengths(self) -> list[int]:
        """Context positions of each sequence; empty until positions are stored."""
        return self._lengths

    @property
    def num_bytes(self) -> int:
        """Size of the buffers in bytes."""
        return sum(buffer.nbytes for buffer in (*self._keys, *self._values) if buffer is not None)

    def announce(self, starts: Sequence[int], ends: Sequence[int], device: torch.device) -> None:
        """Note the positions, which the next draft reads."""
        self.starts = _column(starts, device)
        self.ends = _column(ends, device)
        self.new_counts = [end - start for start, end in zip(starts, ends, strict=True)]

    def needed(self, states: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Cut the states off after the last one that is valid in any sequence."""
        most = max(counts)
        if most < states.shape[1]:
            return states[:, :most]
        return states

    def draft_inputs(
        self, anchors: torch.Tensor, states: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None
    ) -> tuple[Any, ...]:
        """Pass everything on, or None if no states are new. A new context learns how many sequences there are."""
        if not states.shape[1] and self._lengths:
            return anchors, None, last_tokens
        return anchors, states, last_tokens

    def to_dynamic(self) -> ContextCache:
        """Return this context."""
        return self

    def begin(self, batch_size: int, num_positions: int, counts: Sequence[int] | None) -> torch.Tensor | None:
        """Announce the positions; returns a mask on the CPU."""
        self._lengths = self._lengths or [0] * batch_size
        if self._window is not None and max(self._lengths) >= 2 * self._window:
            # Once the longest sequence is twice as long as the window, move each sequence's window to the front.
            self._drop([max(length - self._window, 0) for length in self._lengths])
        if counts is None:
            counts = [num_positions] * batch_size
        self._filled = ends = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        if self._window is not None:
            self.first = max(min(ends) - self._window, 0)
        if min(ends) == max(ends):
            return None
        slots = torch.arange(self.first, max(ends))
        before = torch.tensor(ends)[:, None] - slots  # how far each slot is from the end of each sequence
        if self._window is None:
            return before > 0
        return (before > 0) & (before <= self._window)

    def window(self, size: int) -> tuple[torch.Tensor, range]:
        """Return lengths `[B]` and slots."""
        ends = self._filled
        return torch.tensor(ends), range(max(self.first, min(ends) - size + 1), max(ends))

    def positions(self, slots: range, device: torch.device) -> torch.Tensor:
        """Return the positions `[1, S]`."""
        return torch.arange(slots.start, slots.stop, device=device)[None]

    def append(self, layer_index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store after the lengths, which stay as they are until [`~ContextCache.advance`] is called."""
        end = max(self._filled)
        all_keys = self._keys[layer_index] = self._store(self._keys[layer_index], keys)
        all_values = self._values[layer_index] = self._store(self._values[layer_index], values)
        return all_keys[:, :, :end], all_values[:, :, :end]

    def join(
        self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, length: int, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new context, and join it with the block, which is never stored."""
        split = keys.shape[2] - length
        context_keys, context_values = self.append(layer_index, keys[:, :, :split], values[:, :, :split])
        return (
            torch.cat((context_keys[:, :, first:], keys[:, :, split:]), dim=2),
            torch.cat((context_values[:, :, first:], values[:, :, split:]), dim=2),
        )

    def advance(self) -> None:
        """Add the positions announced last to the lengths."""
        self._lengths = self._filled

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        if self._lengths:
            self._lengths = [self._lengths[row] for row in rows]
        else:
            self._lengths = []
        for buffers in (self._keys, self._values):
            buffers[:] = [None if buffer is None else buffer[list(rows)] for buffer in buffers]

    def can_grow(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether keys of this dtype and device can be appended in the current autograd mode."""
        stored = [buffer for buffer in (*self._keys, *self._values) if buffer is not None]
        if any(buffer.is_inference() for buffer in stored) and not torch.is_inference_mode_enabled():
            return False
        return all(buffer.dtype == dtype and buffer.device == device for buffer in stored)

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep only this many positions from the start of each sequence."""
        self._lengths = [min(length, current) for length, current in zip(lengths, self._lengths, strict=False)]

    def mark_gap(self) -> None:
        """Record that positions between the stored ones and the next ones were not seen."""

    def _drop(self, counts: Sequence[int]) -> None:
        """Remove this many positions from the start of each sequence."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                for row, (length, count) in enumerate(zip(self._lengths, counts, strict=True)):
                    buffer[row, :, : length - count] = buffer[row, :, count:length].clone()
        self._lengths = [length - count for length, count in zip(self._lengths, counts, strict=True)]

    def _store(self, buffer: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        count = new.shape[2]
        capacity = max(self._lengths) + new.shape[2]
        if buffer is None or buffer.shape[2] < capacity:
            spare = SPARE if buffer is None else max(capacity // 2, SPARE)
            if self._window is not None:
                spare = min(spare, self._window)
            # Zeros rather than uninitialised memory: a NaN would spoil the weighted sum even at a masked position.
            grown = new.new_zeros(*new.shape[:2], capacity + spare, new.shape[3])
            if buffer is not None:
                grown[:, :, : buffer.shape[2]] = buffer
            buffer = grown
        if min(self._lengths) == max(self._lengths):
            buffer[:, :, self._lengths[0] : self._lengths[0] + count] = new
        else:
            for row, start in enumerate(self._lengths):
                buffer[row, :, start : start + count] = new[row]
        return buffer


def _column(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """One number for each sequence, `[B, 1]`."""
    if min(values) == max(values):
        return torch.full((len(values), 1), values[0], device=device)
    return torch.tensor(values, device=device)[:, None]
