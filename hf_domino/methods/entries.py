"""The context cache of EAGLE-3: the states of all positions, and keys and values where the next token exists.

The entry of a position combines its state with the token that follows it. The states are kept so that an entry can be
computed again when a conversation goes back and continues with a different token.

Shapes: B batch, C new context positions, S stored entries, E entries to compute, N drafts of all branches so far, L
branches, A heads, D head width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hf_domino.methods.context import ContextCache


class EntryCache(ContextCache):
    """Keeps the states of all positions, and in `entries` the keys and values of the first ones.

    Each state is stored as two halves, which take the places of a key and a value.

    Args:
        window (`int`, *optional*): How many of the last entries a draft sees; None for all. Older ones are dropped.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__(1, window)
        self.entries = ContextCache(1)

    def keep(self, states: torch.Tensor, counts: Sequence[int] | None) -> None:
        """Store states `[B, C, H]` of new positions, of which the first `counts` of each sequence are valid."""
        self.begin(len(states), states.shape[1], counts)
        self.append(0, *states[:, None].chunk(2, dim=-1))
        self.advance()

    def begin_missing_entries(self) -> tuple[torch.Tensor, list[int]]:
        """Announce the entries to compute: all missing ones, and in any case the last one of each sequence.

        Returns:
            `tuple[torch.Tensor, list[int]]`: Their states `[B, E, H]`, and how many of them are valid in each sequence,
            counted from the first.
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
        """Compute attention `[B, A, E, D]` of the announced entries; each one sees itself and the entries before it."""
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

    def attend_drafts(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """Compute attention of drafts, which see the last entries of their sequence (the window) and some other drafts.

        Drafts are not stored.

        Args:
            queries (`torch.Tensor`): Queries of the latest drafts, `[B, A, L, D]`.
            keys (`torch.Tensor`): Keys of all drafts so far, `[B, A, N, D]`.
            values (`torch.Tensor`): Values of all drafts so far, `[B, A, N, D]`.
            sees (`torch.Tensor`): Which drafts each of the latest ones sees, `[B, L, N]` bool.
        """
        lengths = self.entries.lengths
        num_drafts = keys.shape[2]
        self.entries.begin(len(keys), num_drafts, None)
        keys, values = self.entries.append(0, keys, values)  # after the entries; overwritten later
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
        """Remove this many positions from the start of each sequence, states and entries together."""
        super()._drop(counts)
        if made := self.entries.lengths:
            self.entries._drop([min(pair) for pair in zip(counts, made, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, states and entries together."""
        super().select(rows)
        self.entries.select(rows)

    def can_grow(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a drafter of this dtype and device can append both states and entries."""
        return super().can_grow(dtype, device) and self.entries.can_grow(dtype, device)

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep this many positions of each sequence and one entry fewer: another token may follow the last position."""
        super().crop(lengths)
        self.entries.crop([max(length - 1, 0) for length in self.lengths])

    def mark_gap(self) -> None:
        """Record a gap: drop the positions without an entry, because the tokens that follow them are lost."""
        super().crop(self.entries.lengths or [0] * len(self.lengths))
