"""The context that EAGLE-3 keeps: states of all positions, and keys and values of those whose next token is known.

The entry of a position is made of its state and the token behind it. States are kept to make entries again where a
conversation steps back and another token follows.

Shapes: B batch, C new context positions, S stored entries, E entries to be made, N drafts of all branches so far, L
branches, A heads, D head width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_domino.methods.context import ContextCache


class EntryCache(ContextCache):
    """States of all positions, each in two halves, and in `entries` keys and values of the first ones.

    Args:
        window (`int`, *optional*): Entries that a draft sees, the last ones; None for all. Older ones are dropped.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__(1, window)
        self.entries = ContextCache(1)

    def keep(self, states: torch.Tensor, counts: Sequence[int] | None) -> None:
        """Store states `[B, C, H]` of new positions, `counts` valid ones of each row."""
        self.begin(len(states), states.shape[1], counts)
        self.append(0, *states[:, None].chunk(2, dim=-1))
        self.advance()

    def reopen(self) -> tuple[torch.Tensor, list[int]]:
        """Announce the entries that are not made yet, the last of each row at least.

        Returns:
            `tuple[torch.Tensor, list[int]]`: Their states `[B, E, H]`, and how many of each row, the first ones.
        """
        made = self.entries.lengths or [0] * len(self.lengths)
        starts = [min(start, length - 1) for start, length in zip(made, self.lengths, strict=True)]
        self.entries.crop(starts)
        counts = [length - start for start, length in zip(starts, self.lengths, strict=True)]
        num_entries = max(counts)
        self.entries.begin(len(counts), num_entries, counts)
        halves = [buffer[0][:, 0] for buffer in (self._keys, self._values) if buffer[0] is not None]
        if min(counts) == num_entries and min(starts) == max(starts):
            return torch.cat([half[:, starts[0] : starts[0] + num_entries] for half in halves], dim=-1), counts
        places = torch.tensor(starts)[:, None] + torch.arange(num_entries)
        places = places.clamp(max=halves[0].shape[1] - 1)[..., None].to(halves[0].device)
        return torch.cat([half.gather(1, places.expand(-1, -1, half.shape[2])) for half in halves], dim=-1), counts

    def attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention `[B, A, E, D]` of the announced entries, each of which sees those before it and itself."""
        starts = self.entries.lengths
        num_entries = keys.shape[2]
        keys, values = self.entries.append(0, keys, values)  # [B, A, S, D]
        window = self._window or keys.shape[2]
        if num_entries == 1 and min(starts) == max(starts):
            keys, values = keys[:, :, -window:], values[:, :, -window:]
            return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)
        if not any(starts) and num_entries <= window:
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        ends = torch.tensor(starts)[:, None] + torch.arange(num_entries)  # [B, E]
        behind = ends[..., None] - torch.arange(keys.shape[2])
        sees = (behind >= 0) & (behind < window)
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=sees[:, None].to(keys.device), enable_gqa=True
        )

    def attend_behind(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """Attention of drafts, which see the entries of their row's window and some drafts; these are not stored.

        Args:
            queries (`torch.Tensor`): Of the last drafts, `[B, A, L, D]`.
            keys (`torch.Tensor`): Of all drafts so far, `[B, A, N, D]`.
            values (`torch.Tensor`): Likewise.
            sees (`torch.Tensor`): Which drafts are seen, `[B, L, N]` bool.
        """
        lengths = self.entries.lengths
        num_drafts = keys.shape[2]
        self.entries.begin(len(keys), num_drafts, None)
        keys, values = self.entries.append(0, keys, values)  # behind the entries, to be written over
        window = self._window or keys.shape[2]
        if min(lengths) == max(lengths):
            first = max(lengths[0] - window, 0)
            keys, values = keys[:, :, first:], values[:, :, first:]
            mask = F.pad(sees, (lengths[0] - first, 0), value=True)
        else:
            ends = torch.tensor(lengths, device=sees.device)[:, None, None]
            places = ends + torch.arange(num_drafts, device=sees.device)
            behind = ends - torch.arange(keys.shape[2], device=sees.device)
            mask = ((behind > 0) & (behind <= window)).expand(-1, sees.shape[1], -1)
            mask = mask.scatter(2, places.expand_as(sees), sees)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[:, None], enable_gqa=True)

    def _drop(self, counts: Sequence[int]) -> None:
        """Forget so many first positions of each row, states and entries together."""
        super()._drop(counts)
        if made := self.entries.lengths:
            self.entries._drop([min(pair) for pair in zip(counts, made, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, states and entries together."""
        super().select(rows)
        self.entries.select(rows)

    def can_grow(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Tell whether states and entries can grow with a drafter of this dtype and device."""
        return super().can_grow(dtype, device) and self.entries.can_grow(dtype, device)

    def crop(self, lengths: Sequence[int]) -> None:
        """Drop positions from a length on. What follows the last one that stays may be another token."""
        super().crop(lengths)
        self.entries.crop([max(length - 1, 0) for length in self.lengths])

    def leave_gap(self) -> None:
        """Note positions that were missed. The tokens behind those without an entry are not known any more."""
        super().crop(self.entries.lengths or [0] * len(self.lengths))
