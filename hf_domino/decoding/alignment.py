"""Realigning a batch whose sequences keep different numbers of positions, in layers that grow.

After a round, each sequence of a batch drops its own rejected positions. The rest is moved to the right until all
sequences end in the same column. To the target, this looks like any left-padded batch, even with sliding windows. Holes
inside a sequence would not work, because sliding windows would count them. Columns that are padding in every sequence
are cut away, and finished sequences are removed.

Shapes: B sequences before, R sequences after, S positions of a sequence, A heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# Placeholders for layers that keep nothing, because they use the keys of other layers or have no attention. Older
# versions of Transformers leave such layers out of the cache.
PLACEHOLDERS: tuple[type, ...] = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
ALIGNABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, *PLACEHOLDERS)


def unalignable(cache: Any) -> str | None:
    """The class name of a part of the cache that cannot be realigned; None if the whole cache can be."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return type(cache).__name__
    return next((type(layer).__name__ for layer in layers if type(layer) not in ALIGNABLE_LAYERS), None)


@dataclass(frozen=True)
class Alignment:
    """How to realign a batch after a round."""

    rows: Sequence[int]  # places of the sequences that stay, among the current ones
    dropped: Sequence[int]  # how many positions each of them drops at its end
    lengths: Sequence[int]  # how many positions each of them has left, not counting padding

    def sources(self, num_positions: int, num_kept: int, device: torch.device) -> torch.Tensor:
        """Find the old index of each new position, `[R, num_kept]`; negative ones, which are padding, become 0."""
        ends = num_positions - torch.tensor(self.dropped)
        return (ends[:, None] - num_kept + torch.arange(num_kept)).clamp_min(0).to(device)

    def align_positions(self, values: torch.Tensor) -> torch.Tensor:
        """Realign `[..., B, S]` to `[..., R, longest]`."""
        longest = max(self.lengths)
        index = self.sources(values.shape[-1], longest, values.device)
        chosen = values[..., list(self.rows), :]
        return chosen.gather(-1, index.expand(*chosen.shape[:-2], -1, -1))

    def padding_mask(self, device: torch.device) -> torch.Tensor:
        """The padding mask after realignment, `[R, longest]` int64: 1 for a token, 0 for padding."""
        longest = max(self.lengths)
        return (torch.arange(longest) >= longest - torch.tensor(self.lengths)[:, None]).long().to(device)

    def align_cache(self, cache: Cache) -> None:
        """Realign all layers in place. Sliding-window layers must have recorded their past."""
        longest = max(self.lengths)
        indices = {}
        for layer in cache.layers:
            if layer.keys is None:  # it uses the keys of another layer
                continue
            if layer.is_sliding:
                kept = min(longest, layer.sliding_window - 1)
            else:
                kept = longest
            shape = (*layer.keys.shape[1:3], kept, layer.keys.device)
            if shape not in indices:
                indices[shape] = self._flat_index(*shape)
            layer.keys = _select(layer.keys, indices[shape], len(self.rows), kept)
            layer.values = _select(layer.values, indices[shape], len(self.rows), kept)
            if layer.is_sliding:
                layer.cumulative_length = longest

    def _flat_index(self, num_heads: int, num_positions: int, kept: int, device: torch.device) -> torch.Tensor:
        """Indices `[R * A * kept]` into keys flattened to `[B * A * S, D]`, so that whole vectors are copied."""
        positions = self.sources(num_positions, kept, device)  # [R, kept]
        rows = torch.tensor(list(self.rows), device=device)[:, None] * num_heads
        heads = rows + torch.arange(num_heads, device=device)  # [R, A]
        return (heads[..., None] * num_positions + positions[:, None]).flatten()


def _select(states: torch.Tensor, index: torch.Tensor, num_rows: int, kept: int) -> torch.Tensor:
    flat = states.reshape(-1, states.shape[-1]).index_select(0, index)
    return flat.view(num_rows, states.shape[1], kept, states.shape[-1])
