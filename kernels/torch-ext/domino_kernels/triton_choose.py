"""Correct the logits and choose a token, without ever writing the corrections `[B, V]` to memory.

In stage one, every program corrects one tile of columns and keeps the tile's best score. In stage two, one program per
row takes the best tile. Noise is always indexed by token id, also for candidates. Sums are fp32. SiLU and each
correction are rounded once to the dtype of W2, and each corrected logit once to that of the base logits, as in the
PyTorch modules. The two can still differ if the order of an fp32 sum changes which way it is rounded.

Shapes: B rows, N columns (V, or M of a candidate pool), R low rank, T tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reference

TILE_ELEMENTS = 16384  # elements of W2 in the registers of one program: 64 rows at rank 256
MAX_TILE = 128  # columns; a pool of at most that many is one tile and needs no second stage
NUM_WARPS = 8  # with fewer warps, registers would spill at fp32
MIN_NOISE = tl.constexpr(reference.MIN_NOISE)


@triton.jit
def activated(low_rank, weight):
    """Compute SiLU in fp32 and round it to the dtype of W2."""
    return (low_rank * tl.sigmoid(low_rank)).to(weight.dtype.element_ty)


@triton.jit
def corrected(logits, correction, weight, base):
    """Add corrections to logits in fp32; corrections are rounded to W2's dtype, sums to that of the base logits."""
    correction = correction.to(weight.dtype.element_ty).to(tl.float32)
    return (logits + correction).to(base.dtype.element_ty).to(tl.float32)


@triton.jit
def _choose_in_tile(
    base, low_rank, weight, candidates, noise, best_score, best_id,
    num_rows, num_columns, rank, temperature,
    base_stride, low_rank_stride, weight_stride, candidate_stride, noise_stride,
    POOL: tl.constexpr, SAMPLE: tl.constexpr, TILE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < num_columns
    ranks = tl.arange(0, RANK)
    in_rank = ranks < rank
    mask = inside[:, None] & in_rank[None, :]
    if not POOL:  # read once for all rows; leave the L2 cache to weights that fit into it
        rows_of_tile = weight + columns.to(tl.int64)[:, None] * weight_stride
        tile = tl.load(rows_of_tile + ranks[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    for row in range(tl.program_id(1), num_rows, tl.num_programs(1)):
        if POOL:
            ids = tl.load(candidates + row * candidate_stride + columns, mask=inside, other=0)
            tile = tl.load(weight + ids[:, None] * weight_stride + ranks[None, :], mask=mask, other=0.0)
        x = tl.load(low_rank + row * low_rank_stride + ranks, mask=in_rank, other=0.0).to(tl.float32)
        correction = tl.sum(tile.to(tl.float32) * activated(x, weight).to(tl.float32)[None, :], axis=1)
        logits = tl.load(base + row * base_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        scores = corrected(logits, correction, weight, base)
        if SAMPLE:
            drawn = tl.load(noise + row * noise_stride + (ids if POOL else columns), mask=inside, other=1.0)
            scores = scores / temperature - tl.log(tl.where(drawn < MIN_NOISE, MIN_NOISE, drawn))
        scores = tl.where(scores != scores, float("inf"), scores)  # NaN is the largest, as for torch.argmax
        scores = tl.where(inside, scores, float("-inf"))
        top = tl.max(scores, axis=0)
        column = tl.min(tl.where((scores == top) & inside, columns, num_columns), axis=0)
        chosen = column.to(tl.int64)
        if POOL:
            chosen = tl.load(candidates + row * candidate_stride + column)
        tl.store(best_score + row * tl.num_programs(0) + tl.program_id(0), top)
        tl.store(best_id + row * tl.num_programs(0) + tl.program_id(0), chosen)


@triton.jit
def _choose_among_tiles(best_score, best_id, chosen, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    scores = tl.load(best_score + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    top = tl.max(scores, axis=0)
    first = tl.min(tl.where((scores == top) & inside, tiles, TILES), axis=0)
    tl.store(chosen + row, tl.load(best_id + row * num_tiles + first))


def correct_and_choose(
    base_logits: torch.Tensor,
    low_rank: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor | None = None,
    *,
    noise: torch.Tensor | None = None,
    temperature: float | None = None,
) -> torch.Tensor:
    """Triton version of [`domino_kernels.correct_and_choose`]."""
    (num_rows, num_columns), rank = base_logits.shape, up_weight.shape[1]
    rank_block = triton.next_power_of_2(rank)
    pool = candidate_ids is not None
    tile = min(MAX_TILE, triton.next_power_of_2(num_columns))
    if not pool:
        tile = min(tile, max(1, TILE_ELEMENTS // rank_block))
    num_tiles = triton.cdiv(num_columns, tile)
    best_score = base_logits.new_empty((num_rows, num_tiles), dtype=torch.float32)
    best_id = base_logits.new_empty((num_rows, num_tiles), dtype=torch.int64)
    candidates = best_id if candidate_ids is None else candidate_ids  # a pointer is needed even if unused
    exponential = best_score if noise is None else noise
    _choose_in_tile[(num_tiles, num_rows if pool else 1)](
        base_logits, low_rank, up_weight, candidates, exponential, best_score, best_id,
        num_rows, num_columns, rank, temperature or 1.0,
        base_logits.stride(0), low_rank.stride(0), up_weight.stride(0), candidates.stride(0), exponential.stride(0),
        POOL=pool, SAMPLE=noise is not None, TILE=tile, RANK=rank_block, num_warps=NUM_WARPS,
    )  # fmt: skip
    if num_tiles == 1:
        return best_id[:, 0]
    chosen = best_id.new_empty(num_rows)
    _choose_among_tiles[(num_rows,)](best_score, best_id, chosen, num_tiles, TILES=triton.next_power_of_2(num_tiles))
    return chosen
