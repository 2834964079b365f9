"""Attention of blocks side by side on a CPU, in tiles that look only at what their blocks see.

Under the dense mask each of the N * K queries is scored with all C + N * K keys, most of them masked. Here a tile is a
few neighbouring blocks: its keys are the context from the first position that any of them sees to the last, and its own
blocks. Nothing of size N * K x C is ever there, and the backward pass scores each tile again.

The tile's keys lie in one piece of memory without being copied together: its own blocks are written right before its
context, over context that no later tile sees, since tiles are taken in the order of their first context position.

Shapes: B batch, A query heads, E key heads, G query heads per key head, N blocks per row, K block size, C context
positions, M queries of a tile, L context positions of a tile, D head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_domino.drafter.view import BlockView

# At S 3,072 with 256 anchors of 16: fewer queries per tile lose time in small products, more score what is hidden.
QUERIES_PER_TILE = 128
# PyTorch's own kernels behind `scaled_dot_product_attention`, called by name for the log-sum-exp they keep: the public
# function would keep every tile's keys and values for its backward pass.
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Tile(NamedTuple):
    """Neighbouring blocks of one row, and the context that they see together.

    Args:
        row (`int`): Which row of the batch.
        blocks (`slice`): Of N.
        context (`slice`): Of C.
    """

    row: int
    blocks: slice
    context: slice


def tiles_of(view: BlockView, queries_per_tile: int = QUERIES_PER_TILE) -> list[Tile]:
    """Cut a view into tiles.

    Args:
        view (`BlockView`): What blocks see; the fewest scores are wasted where anchors increase.
        queries_per_tile (`int`, *optional*): About how many block positions a tile holds.

    Returns:
        `list[Tile]`: Row by row, by the first context position.
    """
    step = max(1, queries_per_tile // view.block_size)
    firsts, ends = view.firsts.amin(dim=2).tolist(), view.ends.tolist()
    tiles = []
    for row, (row_firsts, row_ends) in enumerate(zip(firsts, ends, strict=True)):
        for start in range(0, len(row_ends), step):
            blocks = slice(start, min(start + step, len(row_ends)))
            seen = [pair for pair in zip(row_firsts[blocks], row_ends[blocks], strict=True) if pair[0] < pair[1]]
            first, end = (min(first for first, _ in seen), max(end for _, end in seen)) if seen else (0, 0)
            tiles.append(Tile(row, blocks, slice(first, end)))
    return sorted(tiles, key=lambda tile: (tile.row, tile.context.start))


def tiled_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: BlockView,
    queries_per_tile: int = QUERIES_PER_TILE,
) -> torch.Tensor:
    """Attention under `view.mask`, without what the mask hides.

    Args:
        queries (`torch.Tensor`): `[B, A, N * K, D]`, on the CPU.
        keys (`torch.Tensor`): Context, then blocks, `[B, E, C + N * K, D]`.
        values (`torch.Tensor`): Likewise.
        view (`BlockView`): What each block sees.
        queries_per_tile (`int`, *optional*): As in [`tiles_of`].

    Returns:
        `torch.Tensor`: `[B, A, N * K, D]`.
    """
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
        buffers = _Buffers(keys, view, tiles), _Buffers(values, view, tiles)
        for tile in tiles:
            span, mask = _span(view, tile), _tile_mask(view, tile, queries)
            tile_keys, tile_values = (buffer.load(tile, span) for buffer in buffers)
            shape = queries[tile.row, :, :, span].shape
            found, log_sums = _forward(
                _grouped(queries, tile, span), tile_keys, tile_values, attn_mask=mask.repeat(shape[1], 1)
            )
            attended[tile.row, :, :, span] = found.reshape(shape)
            sums[tile.row, :, :, span] = log_sums.reshape(shape[:-1])
        ctx.save_for_backward(queries, keys, values, attended, sums)
        ctx.view, ctx.tiles = view, tiles
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Score each tile again, and add up what its keys and values get."""
        queries, keys, values, attended, sums = ctx.saved_tensors
        view: BlockView = ctx.view
        tiles: list[Tile] = ctx.tiles
        of_queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
        # Many tiles add to one context position.
        of_keys, of_values = (torch.zeros_like(pair, dtype=_wide(pair.dtype)) for pair in (keys, values))
        buffers = _Buffers(keys, view, tiles), _Buffers(values, view, tiles)
        for tile in tiles:
            span, mask = _span(view, tile), _tile_mask(view, tile, queries)
            tile_keys, tile_values = (buffer.load(tile, span) for buffer in buffers)
            shape = queries[tile.row, :, :, span].shape
            found = _backward(
                _grouped(gradient, tile, span), _grouped(queries, tile, span), tile_keys, tile_values,
                _grouped(attended, tile, span), sums[None, tile.row, :, :, span].flatten(2, 3), 0.0, False,
                attn_mask=mask.repeat(shape[1], 1),
            )  # fmt: skip
            of_queries[tile.row, :, :, span] = found[0].reshape(shape)
            for total, part in zip((of_keys, of_values), found[1:], strict=True):
                num_own = span.stop - span.start
                total[tile.row, :, view.num_context + span.start : view.num_context + span.stop] = part[0, :, :num_own]
                total[tile.row, :, tile.context] += part[0, :, num_own:]
        return of_queries, of_keys.to(keys.dtype), of_values.to(values.dtype), None, None


class _Buffers:
    """Keys, or values, of one row at a time, with room before the context for the blocks of a tile."""

    def __init__(self, states: torch.Tensor, view: BlockView, tiles: list[Tile]):
        self._states, self._num_context, self._row = states, view.num_context, -1
        self._room = max(tile.blocks.stop - tile.blocks.start for tile in tiles) * view.block_size
        self._buffer = states.new_empty(1, states.shape[1], self._room + view.num_context, states.shape[3])

    def load(self, tile: Tile, span: slice) -> torch.Tensor:
        """The tile's own blocks, then its context, `[1, E, M + L, D]`; good until the next call."""
        if tile.row != self._row:
            self._row = tile.row
            self._buffer[0, :, self._room :] = self._states[tile.row, :, : self._num_context]
        start = self._room + tile.context.start
        own = slice(start - (span.stop - span.start), start)
        blocks = slice(self._num_context + span.start, self._num_context + span.stop)
        self._buffer[0, :, own] = self._states[tile.row, :, blocks]
        return self._buffer[:, :, own.start : self._room + tile.context.stop]


def _span(view: BlockView, tile: Tile) -> slice:
    """Block positions of a tile, of N * K."""
    return slice(tile.blocks.start * view.block_size, tile.blocks.stop * view.block_size)


def _grouped(states: torch.Tensor, tile: Tile, span: slice) -> torch.Tensor:
    """A tile of `[B, E, G, N * K, D]` as queries of the key heads, so that no key is repeated, `[1, E, G * M, D]`."""
    return states[None, tile.row, :, :, span].flatten(2, 3)


def _tile_mask(view: BlockView, tile: Tile, states: torch.Tensor) -> torch.Tensor:
    """What a tile's queries see of its own blocks and its context, `[M, M + L]`: 0, or minus infinity if hidden."""
    positions = torch.arange(tile.context.start, tile.context.stop)
    firsts, ends = view.firsts[tile.row, tile.blocks], view.ends[tile.row, tile.blocks]
    context = (positions >= firsts[..., None]) & (positions < ends[:, None, None])  # [M / K, K, L]
    own = torch.kron(torch.eye(len(ends), dtype=torch.bool), view.inside)  # [M, M]
    hidden = ~torch.cat((own, context.flatten(0, 1)), dim=1)
    return states.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """At least fp32."""
    return torch.promote_types(dtype, torch.float32)
