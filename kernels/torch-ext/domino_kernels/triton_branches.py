"""One depth of a tree: the states of the branches that continue, and the corrected logits of each branch's candidates.

There are two kernels because a correction needs all units of a state. A single kernel would have to wait for them at a
barrier across the device, which takes about as long as the next launch of a graph (`kernels/CARD.md`). Branches share
the weights that are read: tensor cores multiply them with 16 to 64 branches at once. Sums are fp32, and the same
values are rounded as in the other kernels.

Shapes: B rows, L branches per row, S branches per row at the previous depth, V vocabulary, M candidates, R low rank, G
width of the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_choose import activated, corrected
from .triton_gru import next_units

MIN_SIDE = 16  # smallest side of a matrix product on tensor cores
MAX_BRANCHES = 64  # branches per program, so that its sums stay in registers
UNITS = 16  # units of the state per program: 64 programs at G = 1024
TILE = 32  # candidates per program: four programs for the 128 candidates of a row
CHUNK_BYTES = 256  # bytes of a weight row that are read at once
# Triton's interpreter would multiply the integers that represent bf16 numbers, so there they are converted to fp32.
IS_WIDE = tl.constexpr(not isinstance(next_units, triton.JITFunction))


@triton.jit
def _add_product(sums, x, rows):
    """Add the product of x [N, C] and rows [U, C] to the sums [N, U], in fp32."""
    if IS_WIDE:
        x, rows = x.to(tl.float32), rows.to(tl.float32)
    return tl.dot(x, tl.trans(rows), sums, input_precision="ieee")


@triton.jit
def _advance(
    products, state, owners, weight, next_state,
    num_branches_of_all, num_branches, num_units,
    product_row_stride, product_stride, state_row_stride, state_stride, owner_row_stride, owner_stride, stride,
    BRANCHES: tl.constexpr, UNITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    branches = tl.program_id(1) * BRANCHES + tl.arange(0, BRANCHES)
    is_branch = branches < num_branches_of_all
    mask = is_branch[:, None] & (units < num_units)[None, :]
    rows, branches_of_row = branches // num_branches, branches % num_branches
    owner = tl.load(owners + rows * owner_row_stride + branches_of_row * owner_stride, mask=is_branch, other=0)
    old = (state + rows * state_row_stride + owner * state_stride)[:, None]
    of_r = weight + units.to(tl.int64)[:, None] * stride
    of_z = weight + (units + num_units).to(tl.int64)[:, None] * stride
    of_n = weight + (units + 2 * num_units).to(tl.int64)[:, None] * stride
    state_r = tl.zeros((BRANCHES, UNITS), tl.float32)
    state_z = tl.zeros((BRANCHES, UNITS), tl.float32)
    state_n = tl.zeros((BRANCHES, UNITS), tl.float32)
    for start in range(0, num_units, CHUNK):
        columns = (start + tl.arange(0, CHUNK))[None, :]
        inside = columns < num_units
        x = tl.load(old + columns, mask=is_branch[:, None] & inside, other=0.0)
        filled = (units < num_units)[:, None] & inside
        r = tl.load(of_r + columns, mask=filled, other=0.0)
        z = tl.load(of_z + columns, mask=filled, other=0.0)
        n = tl.load(of_n + columns, mask=filled, other=0.0)
        state_r = _add_product(state_r, x, r)
        state_z = _add_product(state_z, x, z)
        state_n = _add_product(state_n, x, n)
    of_token = (products + rows * product_row_stride + branches_of_row * product_stride)[:, None] + units[None, :]
    r = tl.load(of_token, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(of_token + num_units, mask=mask, other=0.0).to(tl.float32)
    n = tl.load(of_token + 2 * num_units, mask=mask, other=0.0).to(tl.float32)
    kept = tl.load(old + units[None, :], mask=mask, other=0.0).to(tl.float32)
    result = next_units(r, z, n, state_r, state_z, state_n, kept)
    target = next_state + branches[:, None] * num_units + units[None, :]
    tl.store(target, result.to(next_state.dtype.element_ty), mask=mask)


@triton.jit
def _correct(
    base, block_part, state_part, weight, candidates, scores,
    num_branches, num_columns, rank,
    base_stride, block_stride, state_row_stride, state_stride, stride, candidate_stride,
    BRANCHES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1)
    branches = tl.program_id(2) * BRANCHES + tl.arange(0, BRANCHES)
    inside, is_branch = columns < num_columns, branches < num_branches
    ids = tl.load(candidates + row * candidate_stride + columns, mask=inside, other=0)
    of_branches = (state_part + row * state_row_stride + branches * state_stride)[:, None]
    of_columns = weight + ids[:, None] * stride
    correction = tl.zeros((BRANCHES, TILE), tl.float32)
    for start in range(0, rank, CHUNK):
        ranks = start + tl.arange(0, CHUNK)
        in_rank = ranks < rank
        of_block = tl.load(block_part + row * block_stride + ranks, mask=in_rank, other=0.0).to(tl.float32)
        mask = is_branch[:, None] & in_rank[None, :]
        of_state = tl.load(of_branches + ranks[None, :], mask=mask, other=0.0).to(tl.float32)
        low_rank = (of_block[None, :] + of_state).to(weight.dtype.element_ty).to(tl.float32)
        tile = tl.load(of_columns + ranks[None, :], mask=inside[:, None] & in_rank[None, :], other=0.0)
        correction = _add_product(correction, activated(low_rank, weight), tile)
    logits = tl.load(base + row * base_stride + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = corrected(logits, correction, weight, base)
    target = scores + (row * num_branches + branches)[:, None] * num_columns + columns[None, :]
    tl.store(target, result.to(scores.dtype.element_ty), mask=is_branch[:, None] & inside[None, :])


def advance_branches(
    products: torch.Tensor, state: torch.Tensor, owners: torch.Tensor, weight_hh: torch.Tensor
) -> torch.Tensor:
    """Triton version of [`domino_kernels.advance_branches`]."""
    (num_rows, num_branches), num_units = owners.shape, state.shape[2]
    next_state = state.new_empty(num_rows, num_branches, num_units)
    branches, count = _branches_at_once(num_rows * num_branches), num_rows * num_branches
    _advance[(triton.cdiv(num_units, UNITS), triton.cdiv(count, branches))](
        products, state, owners, weight_hh, next_state,
        count, num_branches, num_units,
        *products.stride()[:2], *state.stride()[:2], *owners.stride(), weight_hh.stride(0),
        BRANCHES=branches, UNITS=UNITS, CHUNK=_chunk(weight_hh),
    )  # fmt: skip
    return next_state


def correct_branches(
    base_logits: torch.Tensor,
    block_part: torch.Tensor,
    state_part: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor,
) -> torch.Tensor:
    """Triton version of [`domino_kernels.correct_branches`]."""
    (num_rows, num_branches, rank), num_columns = state_part.shape, base_logits.shape[1]
    scores = base_logits.new_empty(num_rows, num_branches, num_columns)
    branches = _branches_at_once(num_branches)
    _correct[(triton.cdiv(num_columns, TILE), num_rows, triton.cdiv(num_branches, branches))](
        base_logits, block_part, state_part, up_weight, candidate_ids, scores,
        num_branches, num_columns, rank,
        base_logits.stride(0), block_part.stride(0), *state_part.stride()[:2],
        up_weight.stride(0), candidate_ids.stride(0),
        BRANCHES=branches, TILE=TILE, CHUNK=_chunk(up_weight),
    )  # fmt: skip
    return scores


def _branches_at_once(count: int) -> int:
    return min(MAX_BRANCHES, max(MIN_SIDE, triton.next_power_of_2(count)))


def _chunk(weight: torch.Tensor) -> int:
    return min(CHUNK_BYTES // weight.element_size(), max(MIN_SIDE, triton.next_power_of_2(weight.shape[1])))
