"""`advance_branches` and `correct_branches`: kernels against references, and these against the operations of chains."""

from __future__ import annotations

import pytest
import torch
from parity import (
    MOST_TIPPED,
    ROUNDED,
    STATE_TOLERANCE,
    advance_both,
    assert_equal_corrections,
    correct_both,
    make_advance,
    make_corrections,
    round_corrected,
)

from domino_kernels import correct_and_choose, gru_step

# B, L, S, G and B, L, M, V, R: one branch, few sizes that fit the tiles, more branches than a program takes.
ADVANCES = [(3, 1, 1, 21), (1, 8, 8, 150), (3, 5, 7, 16), (2, 40, 3, 1), (3, 8, 2, 33)]
CORRECTIONS = [(3, 1, 1, 50, 17), (1, 8, 70, 333, 48), (3, 5, 33, 64, 5), (2, 70, 7, 9, 1), (2, 8, 64, 100, 200)]
DTYPES = list(STATE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ADVANCES, ids=str)
def test_states_are_equal(shape, dtype, device):
    ours, theirs = advance_both(*make_advance(shape, dtype, device))
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=STATE_TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "dtype"), [*zip(CORRECTIONS, 2 * DTYPES, strict=False)], ids=str)
def test_corrected_logits_are_equal(shape, dtype, base_dtype, device):
    inputs = make_corrections(shape, dtype, device, base_dtype)
    ours, theirs = correct_both(*inputs)
    assert ours.dtype == theirs.dtype == base_dtype
    assert_equal_corrections(ours, theirs, inputs[0], inputs[3])


@pytest.mark.parametrize(("dtype", "base_dtype"), ROUNDED, ids=str)
def test_corrected_logits_are_rounded_where_it_is_said(dtype, base_dtype, device):
    base, block_part, state_part, up_weight, ids = make_corrections((2, 5, 40, 64, 17), dtype, device, base_dtype)
    low_rank = (block_part[:, None] + state_part)[:, :, None]  # [B, L, 1, R]
    expected = round_corrected(base[:, None], low_rank, up_weight[ids][:, None])
    for scores in correct_both(base, block_part, state_part, up_weight, ids):
        assert (scores != expected).double().mean() <= MOST_TIPPED


def test_a_lane_is_a_step_of_the_gru(device):
    products, state, owners, weight_hh = make_advance((3, 5, 4, 21), torch.float32, device)
    weight_ih = torch.eye(63, device=device)  # products are what the tokens bring to the gates
    before = state.gather(1, owners[..., None].expand(-1, -1, 21))
    expected = gru_step(products.flatten(0, 1), before.flatten(0, 1), weight_ih, weight_hh).view(3, 5, 21)
    for states in advance_both(products, state, owners, weight_hh):
        torch.testing.assert_close(states, expected, atol=STATE_TOLERANCE[torch.float32], rtol=0)


def test_inputs_may_be_slices(device):
    products, state, owners, weight_hh = make_advance((4, 8, 6, 21), torch.float32, device)
    wide, narrow = torch.cat((weight_hh, weight_hh), dim=1)[:, :21], slice(1, 6)
    sliced = products[::2, narrow], state[1::2, :5], owners[::2, narrow].clamp_max(4), wide
    torch.testing.assert_close(*advance_both(*sliced), atol=STATE_TOLERANCE[torch.float32], rtol=0)
    base, block_part, state_part, up_weight, ids = make_corrections((4, 8, 40, 333, 17), torch.float32, device)
    wide = torch.cat((up_weight, up_weight), dim=1)[:, :17]
    sliced = base[::2, :30], block_part[1::2], state_part[::2, narrow], wide, ids[1::2, :30]
    assert_equal_corrections(*correct_both(*sliced), base, up_weight)


def test_the_best_child_of_a_lane_is_what_a_chain_chooses(device):
    base, block_part, state_part, up_weight, ids = make_corrections((3, 5, 40, 333, 17), torch.float32, device)
    for scores in correct_both(base, block_part, state_part, up_weight, ids):
        for branch in range(5):
            chosen = correct_and_choose(base, block_part + state_part[:, branch], up_weight, ids)
            assert torch.equal(ids.gather(1, scores[:, branch].argmax(dim=1, keepdim=True))[:, 0], chosen)


def test_forbidden_candidates_stay_forbidden(device):
    base, *others = make_corrections((2, 3, 40, 333, 17), torch.float32, device)
    base[0, 1:] = -torch.inf
    for scores in correct_both(base, *others):
        assert torch.equal(scores.isinf(), base.isinf()[:, None].expand_as(scores))
        assert not scores.isnan().any()
