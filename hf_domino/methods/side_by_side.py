"""Parallel blocks at many anchors of an existing text: each block sees itself and the context before its anchor.

`BlockView` is the only description of what a block sees; attention follows from it. A GPU runs flex attention, which
skips masked tiles. Elsewhere, attention uses a dense mask `[N * K, C + N * K]`.

Shapes: B batch, S sequence length, A query heads, E key heads, N blocks per sequence, K block size, C context
positions, D head width.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

UNUSED = -1  # pads the anchors of sequences that have fewer anchors than others
MIN_FLEX_WIDTH = 16  # the smallest head width that flex attention's matrix products support


@dataclass(frozen=True, eq=False)
class BlockView:
    """What the positions of parallel blocks see. The keys are those of the context, then those of the blocks.

    Args:
        firsts (`torch.Tensor`): First context position that each block position sees, `[B, N, K]` int64.
        ends (`torch.Tensor`): Position at which the visible context of each block ends (exclusive): its anchor,
            `[B, N]` int64.
        inside (`torch.Tensor`): Which positions of its own block (columns) each block position sees, `[K, K]` bool.
        num_context (`int`): Number of context positions (C).
    """

    firsts: torch.Tensor
    ends: torch.Tensor
    inside: torch.Tensor
    num_context: int

    @classmethod
    def at(cls, anchors: torch.Tensor, block_size: int, num_context: int, window: int | None = None) -> BlockView:
        """Create the view of blocks that see all of themselves and the context strictly before their anchors.

        Args:
            anchors (`torch.Tensor`): `[B, N]` int64; an unused block, at -1, sees only itself.
            block_size (`int`): Positions of a block (K).
            num_context (`int`): Number of context positions (C).
            window (`int`, *optional*): How many of the positions before its anchor each block sees; None for all.
        """
        inside = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
        ends = anchors.clamp(0, num_context)
        firsts = torch.zeros_like(ends)
        if window is not None:
            firsts = (anchors - window).clamp(min=0)
        firsts = firsts[..., None].expand(-1, -1, block_size)
        return cls(firsts, ends, inside, num_context)

    @property
    def block_size(self) -> int:
        """Positions of a block (K)."""
        return len(self.inside)

    @property
    def num_queries(self) -> int:
        """Block positions of a sequence, N * K."""
        return self.ends.shape[1] * self.block_size

    @property
    def num_keys(self) -> int:
        """Context and block positions of a sequence, C + N * K."""
        return self.num_context + self.num_queries

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """The view as a dense mask, `[B, 1, N * K, C + N * K]` bool, True where a query may attend."""
        positions = torch.arange(self.num_context, device=self.ends.device)
        context = (positions >= self.firsts[..., None]) & (positions < self.ends[..., None, None])  # [B, N, K, C]
        same_block = torch.eye(self.ends.shape[1], dtype=torch.bool, device=self.ends.device)
        blocks = torch.kron(same_block, self.inside).expand(len(self.ends), -1, -1)  # [B, N * K, N * K]
        return torch.cat((context.flatten(1, 2), blocks), dim=-1)[:, None]

    def to(self, device: torch.device) -> BlockView:
        """Return the view on another device."""
        return BlockView(self.firsts.to(device), self.ends.to(device), self.inside.to(device), self.num_context)


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks start at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions past the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)


def attend_side_by_side(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: BlockView, dropout: float = 0.0
) -> torch.Tensor:
    """Attend from queries `[B, A, N * K, D]` to context and blocks `[B, E, C + N * K, D]`; the queries' shape stays."""
    # Under autocast, norms return fp32 but projections do not, and flex attention does not cast its inputs.
    queries = queries.to(values.dtype)
    keys = keys.to(values.dtype)
    if not dropout and can_flex(queries):
        return flex_attention(queries, keys, values, view)
    enable_gqa = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=view.mask, dropout_p=dropout, enable_gqa=enable_gqa
    )


def can_flex(queries: torch.Tensor) -> bool:
    """Whether flex attention has a kernel for the device, dtype and width of queries `[..., D]`."""
    is_taken = queries.is_cuda and queries.dtype != torch.float64 and queries.shape[-1] >= MIN_FLEX_WIDTH
    return is_taken and importlib.util.find_spec("triton") is not None


def flex_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: BlockView) -> torch.Tensor:
    """Attend under `view.mask` with PyTorch's flex attention, which skips tiles of keys that no query sees."""
    from torch.nn.attention.flex_attention import flex_attention as eager

    attend: Any = _compiled(eager) if queries.is_cuda else eager
    return attend(queries, keys, values, block_mask=block_mask(view), enable_gqa=queries.shape[1] != keys.shape[1])


_compiled: Callable[..., Any] = functools.cache(torch.compile)


@functools.lru_cache(maxsize=2)  # one for a batch's full layers, one for its sliding layers
def block_mask(view: BlockView) -> Any:
    """Convert the view to flex attention's `BlockMask`, once for all layers that share it."""
    from torch.nn.attention.flex_attention import create_block_mask

    size = view.block_size
    num_context = view.num_context
    last = view.num_queries - 1
    firsts = view.firsts.flatten(1)
    ends = view.ends
    inside = view.inside

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # Tiles extend past the last query and key.
        query = query.clamp(max=last)
        own = (key - num_context).clamp(0, last)
        context = (key >= firsts[row, query]) & (key < ends[row, query // size])
        block = (key >= num_context) & (own // size == query // size) & inside[query % size, own % size]
        return context | block

    return create_block_mask(sees, len(ends), None, view.num_queries, view.num_keys, str(ends.device))
