"""Blocks at many anchors of a known text, side by side: each sees the context before its anchor, and itself.

`BlockView` is the only description of it. From it comes attention: in tiles on a CPU, by flex attention on a GPU, under
the dense mask if it is small. Under that each of the N * K queries is scored with all C + N * K keys, most of them
masked. A tile is a few neighbouring blocks: its keys are its own blocks, and the context from the first position that
any of them sees to the last. Nothing of size N * K x C is ever there, and the backward pass scores each tile again.

Shapes: B batch, S sequence length, A query heads, E key heads, G query heads per key head, N blocks per row, K block
size, C context positions, M queries of a tile, L context positions of a tile, D head width.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

UNUSED = -1  # fills the anchors of rows that hold fewer than the longest
# Scores of a row and head up to which one product under a mask is sooner done than several without.
MAX_DENSE_SCORES = 2**16
# At S 3,072 with 256 anchors of 16: fewer queries per tile lose time in small products, more score what is hidden.
QUERIES_PER_TILE = 128
MIN_FLEX_WIDTH = 16  # of flex attention's matrix products
# PyTorch's own kernels behind `scaled_dot_product_attention`, called by name for the log-sum-exp they keep: the public
# function would keep every tile's keys and values for its backward pass.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class BlockView:
    """What the positions of blocks side by side see. Keys are ordered: context, then the blocks.

    Args:
        firsts (`torch.Tensor`): First context position that each block position sees, `[B, N, K]` int64.
        ends (`torch.Tensor`): Where the context that a block sees ends, its anchor, `[B, N]` int64.
        inside (`torch.Tensor`): Which positions of its own block (columns) each block position sees, `[K, K]` bool.
        num_context (`int`): Context positions there are (C).
    """

    firsts: torch.Tensor
    ends: torch.Tensor
    inside: torch.Tensor
    num_context: int

    @classmethod
    def at(cls, anchors: torch.Tensor, block_size: int, num_context: int) -> BlockView:
        """The view of blocks that see all of themselves and the context strictly before their anchors.

        Args:
            anchors (`torch.Tensor`): `[B, N]` int64; a block at -1, which is unused, sees only itself.
            block_size (`int`): Positions of a block (K).
            num_context (`int`): Context positions there are (C).
        """
        firsts = torch.zeros_like(anchors)[..., None].expand(-1, -1, block_size)
        inside = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
        ends = anchors.clamp(0, num_context)
        return cls(firsts, ends, inside, num_context)

    @property
    def block_size(self) -> int:
        """Positions of a block (K)."""
        return len(self.inside)

    @property
    def num_queries(self) -> int:
        """Block positions of a row, N * K."""
        return self.ends.shape[1] * self.block_size

    @property
    def num_keys(self) -> int:
        """Context and block positions of a row, C + N * K."""
        return self.num_context + self.num_queries

    @property
    def mask(self) -> torch.Tensor:
        """The view written out, `[B, 1, N * K, C + N * K]` bool, True where a query may look."""
        positions = torch.arange(self.num_context, device=self.ends.device)
        context = (positions >= self.firsts[..., None]) & (positions < self.ends[..., None, None])  # [B, N, K, C]
        same_block = torch.eye(self.ends.shape[1], dtype=torch.bool, device=self.ends.device)
        blocks = torch.kron(same_block, self.inside).expand(len(self.ends), -1, -1)  # [B, N * K, N * K]
        return torch.cat((context.flatten(1, 2), blocks), dim=-1)[:, None]

    def to(self, device: torch.device) -> BlockView:
        """The same view on a device."""
        return BlockView(self.firsts.to(device), self.ends.to(device), self.inside.to(device), self.num_context)


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks stand at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions behind the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)


def attend_side_by_side(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: BlockView, dropout: float = 0.0
) -> torch.Tensor:
    """Attention `[B, A, N * K, D]` of queries `[B, A, N * K, D]` over context and blocks `[B, E, C + N * K, D]`."""
    # Under autocast a norm gives fp32 and a projection does not, and neither tiles nor flex attention follow autocast.
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    if not dropout and can_flex(queries):
        return flex_attention(queries, keys, values, view)
    if not dropout and queries.device.type == "cpu" and view.num_queries * view.num_keys > MAX_DENSE_SCORES:
        return tiled_attention(queries, keys, values, view)
    enable_gqa = queries.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=view.mask, dropout_p=dropout, enable_gqa=enable_gqa
    )


def can_flex(queries: torch.Tensor) -> bool:
    """Whether flex attention has a kernel for queries `[..., D]` of such a device, dtype and width."""
    is_taken = queries.is_cuda and queries.dtype != torch.float64 and queries.shape[-1] >= MIN_FLEX_WIDTH
    return is_taken and importlib.util.find_spec("triton") is not None


def flex_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: BlockView) -> torch.Tensor:
    """Attention under `view.mask` by PyTorch's flex attention, which skips tiles of keys that no query sees."""
    from torch.nn.attention.flex_attention import flex_attention as eager

    attend: Any = _compiled(eager) if queries.is_cuda else eager
    return attend(queries, keys, values, block_mask=block_mask(view), enable_gqa=queries.shape[1] != keys.shape[1])


_compiled: Callable[..., Any] = functools.cache(torch.compile)


@functools.lru_cache(maxsize=2)  # of a batch's full layers, and of its sliding layers
def block_mask(view: BlockView) -> Any:
    """The view as flex attention's `BlockMask`, made once for all layers that share it."""
    from torch.nn.attention.flex_attention import create_block_mask

    size, num_context, last = view.block_size, view.num_context, view.num_queries - 1
    firsts, ends, inside = view.firsts.flatten(1), view.ends, view.inside

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # Tiles reach behind the last query and key.
        query, own = query.clamp(max=last), (key - num_context).clamp(0, last)
        context = (key >= firsts[row, query]) & (key < ends[row, query // size])
        block = (key >= num_context) & (own // size == query // size) & inside[query % size, own % size]
        return context | block

    return create_block_mask(sees, len(ends), None, view.num_queries, view.num_keys, str(ends.device))


class Tile(NamedTuple):
    """Neighbouring blocks of one row of the batch: their positions, of N * K, and the context that they see, of C."""

    row: int
    blocks: slice
    context: slice


def tiles_of(view: BlockView, queries_per_tile: int = QUERIES_PER_TILE) -> list[Tile]:
    """Cut a view into tiles; the fewest scores are wasted where anchors increase."""
    size = view.block_size
    step = max(1, queries_per_tile // size)
    tiles = []
    for row, (firsts, ends) in enumerate(zip(view.firsts.amin(dim=2).tolist(), view.ends.tolist(), strict=True)):
        for start in range(0, len(ends), step):
            stop = min(start + step, len(ends))
            seen = [pair for pair in zip(firsts[start:stop], ends[start:stop], strict=True) if pair[0] < pair[1]]
            first, end = (min(first for first, _ in seen), max(end for _, end in seen)) if seen else (0, 0)
            tiles.append(Tile(row, slice(start * size, stop * size), slice(first, end)))
    return tiles


def tiled_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: BlockView,
    queries_per_tile: int = QUERIES_PER_TILE,
) -> torch.Tensor:
    """Attention under `view.mask` on the CPU, without the scores that the mask hides."""
    if torch.is_autocast_enabled("cpu"):  # which does not reach the kernels called here
        dtype = torch.get_autocast_dtype("cpu")
        queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # [B, E, G, N * K, D]
    return _TiledAttention.apply(grouped, keys, values, view, tiles_of(view, queries_per_tile)).flatten(1, 2)


class _TiledAttention(torch.autograd.Function):
    """Queries `[B, E, G, N * K, D]` over keys and values `[B, E, C + N * K, D]`."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        view: BlockView,
        tiles: list[Tile],
    ) -> torch.Tensor:
        """Attend, tile by tile; kept for the backward pass are the arguments, the result and its log-sum-exps."""
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        sums = queries.new_empty(queries.shape[:-1], dtype=_wide(queries.dtype))  # logs of them [B, E, G, N * K]
        for tile in tiles:
            shape = queries[tile.row, :, :, tile.blocks].shape
            own = _grouped(queries, tile), _seen(keys, view, tile), _seen(values, view, tile)
            found, log_sums = _forward(*own, attn_mask=_mask(view, tile, queries).repeat(shape[1], 1))
            attended[tile.row, :, :, tile.blocks] = found.reshape(shape)
            sums[tile.row, :, :, tile.blocks] = log_sums.reshape(shape[:-1])
        ctx.save_for_backward(queries, keys, values, attended, sums)
        ctx.view, ctx.tiles = view, tiles
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Score each tile again, and add up what its keys and values get."""
        queries, keys, values, attended, sums = ctx.saved_tensors
        view: BlockView = ctx.view
        of_queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
        # Many tiles add to one context position.
        of_keys, of_values = (torch.zeros_like(pair, dtype=_wide(pair.dtype)) for pair in (keys, values))
        for tile in ctx.tiles:
            shape = queries[tile.row, :, :, tile.blocks].shape
            own = _grouped(queries, tile), _seen(keys, view, tile), _seen(values, view, tile)
            found = _backward(
                _grouped(gradient, tile), *own, _grouped(attended, tile), _grouped(sums, tile), 0.0, False,
                attn_mask=_mask(view, tile, queries).repeat(shape[1], 1),
            )  # fmt: skip
            of_queries[tile.row, :, :, tile.blocks] = found[0].reshape(shape)
            num_own = tile.blocks.stop - tile.blocks.start
            for total, part in zip((of_keys, of_values), found[1:], strict=True):
                total[tile.row, :, view.num_context :][:, tile.blocks] = part[0, :, :num_own]
                total[tile.row, :, tile.context] += part[0, :, num_own:]
        return of_queries, of_keys.to(keys.dtype), of_values.to(values.dtype), None, None


def _seen(states: torch.Tensor, view: BlockView, tile: Tile) -> torch.Tensor:
    """A tile's own blocks, then its context, `[1, E, M + L, D]` of keys or values."""
    of_row = states[None, tile.row]
    return torch.cat((of_row[:, :, view.num_context :][:, :, tile.blocks], of_row[:, :, tile.context]), dim=2)


def _grouped(states: torch.Tensor, tile: Tile) -> torch.Tensor:
    """A tile of `[B, E, G, N * K, ...]` as queries of key heads, so that no key is repeated: `[1, E, G * M, ...]`."""
    return states[None, tile.row, :, :, tile.blocks].flatten(2, 3)


def _mask(view: BlockView, tile: Tile, states: torch.Tensor) -> torch.Tensor:
    """What a tile's queries see of its own blocks and its context, `[M, M + L]`: 0, or minus infinity if hidden."""
    positions = torch.arange(tile.context.start, tile.context.stop)
    firsts = view.firsts[tile.row].flatten()[tile.blocks, None]  # [M, 1]
    ends = view.ends[tile.row].repeat_interleave(view.block_size)[tile.blocks, None]
    own = torch.kron(torch.eye(len(ends) // view.block_size, dtype=torch.bool), view.inside)  # [M, M]
    hidden = ~torch.cat((own, (positions >= firsts) & (positions < ends)), dim=1)
    return states.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)
