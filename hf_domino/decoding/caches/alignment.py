"""Right alignment: rows of a batch that kept different numbers of tokens, brought back to a common end.

After a round each row drops its own rejected positions. Moved to the right until all rows end together, a batch looks
to the target like any left-padded one, sliding windows included; holes inside a row would be counted by their windows.
Columns that are padding in every row are cut away, and rows that are done leave.

Shapes: B rows before, R rows after, S positions of a row, A heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_domino.decoding.caches.rewind import PLACEHOLDERS

ALIGNABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, *PLACEHOLDERS)
# Keyword arguments of the target's forward with one entry per position, the last dimension; rows are the one before.
PER_POSITION = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Alignment:
    """How to realign a batch after a round.

    Args:
        rows (`Sequence[int]`): Rows that stay, of those there are now.
        dropped (`Sequence[int]`): Positions that each of them drops at its end.
        lengths (`Sequence[int]`): Positions that are left in each of them, padding not counted.
    """

    rows: Sequence[int]
    dropped: Sequence[int]
    lengths: Sequence[int]

    def sources(self, num_positions: int, num_kept: int, device: torch.device) -> torch.Tensor:
        """Where each position after comes from, `[R, num_kept]`; clamped where it is padding.

        Args:
            num_positions (`int`): Positions now (S).
            num_kept (`int`): Positions after.
            device (`torch.device`): Where the indices are wanted.
        """
        ends = num_positions - torch.tensor(self.dropped)
        return (ends[:, None] - num_kept + torch.arange(num_kept)).clamp_min(0).to(device)

    def align_positions(self, values: torch.Tensor) -> torch.Tensor:
        """Realign `[..., B, S]` to `[..., R, longest]`."""
        longest = max(self.lengths)
        index = self.sources(values.shape[-1], longest, values.device)
        chosen = values[..., list(self.rows), :]
        return chosen.gather(-1, index.expand(*chosen.shape[:-2], -1, -1))

    def padding_mask(self, device: torch.device) -> torch.Tensor:
        """1 where a position after is no padding, `[R, longest]` int64."""
        longest = max(self.lengths)
        return (torch.arange(longest) >= longest - torch.tensor(self.lengths)[:, None]).long().to(device)

    def align_cache(self, cache: Cache) -> None:
        """Realign all layers in place.

        Args:
            cache (`Cache`): Layers of `ALIGNABLE_LAYERS`; sliding ones must have recorded their past.
        """
        longest, indices = max(self.lengths), {}
        for layer in cache.layers:
            if layer.keys is None:  # uses those of another layer
                continue
            kept = min(longest, layer.sliding_window - 1) if layer.is_sliding else longest
            shape = (*layer.keys.shape[:3], kept, layer.keys.device)
            if shape not in indices:
                indices[shape] = self._flat_index(*shape)
            layer.keys = _select(layer.keys, indices[shape], len(self.rows), kept)
            layer.values = _select(layer.values, indices[shape], len(self.rows), kept)
            if layer.is_sliding:
                layer.cumulative_length = longest

    def _flat_index(self, _: int, num_heads: int, num_positions: int, kept: int, device: torch.device) -> torch.Tensor:
        """Indices `[R * A * kept]` into keys flattened to `[B * A * S, D]`: whole vectors are copied."""
        positions = self.sources(num_positions, kept, device)  # [R, kept]
        rows = torch.tensor(list(self.rows), device=device)[:, None] * num_heads
        heads = rows + torch.arange(num_heads, device=device)  # [R, A]
        return (heads[..., None] * num_positions + positions[:, None]).flatten()


def _select(states: torch.Tensor, index: torch.Tensor, num_rows: int, kept: int) -> torch.Tensor:
    flat = states.reshape(-1, states.shape[-1]).index_select(0, index)
    return flat.view(num_rows, states.shape[1], kept, states.shape[-1])


def empty(cache: Cache) -> None:
    """Drop all positions of a cache of `ALIGNABLE_LAYERS`."""
    for layer in cache.layers:
        if isinstance(layer, PLACEHOLDERS):
            continue
        layer.keys = layer.values = None
        layer.is_initialized = False
        if layer.is_sliding:
            layer.cumulative_length = 0


def unalignable(cache: Any) -> str | None:
    """Name of a part of the cache that rows cannot be realigned in, or None."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return type(cache).__name__
    return next((type(layer).__name__ for layer in layers if type(layer) not in ALIGNABLE_LAYERS), None)
