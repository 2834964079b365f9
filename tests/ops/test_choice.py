"""`correct_and_choose`: the kernel against its reference, and both against what they promise."""

from __future__ import annotations

import pytest
import torch
from parity import (
    ROUNDED,
    assert_equal_up_to_ties,
    choose_both,
    make_choice,
    make_noise,
    make_pool,
    round_corrected,
)

SHAPES = [(1, 1000, 48), (2, 333, 17), (3, 64, 5), (2, 1, 1), (1, 129, 256)]  # B, V, R: few of them fit the tiles


@pytest.mark.parametrize(
    ("shape", "dtype", "base_dtype"),
    [
        *((shape, torch.float32, torch.float32) for shape in SHAPES),
        (SHAPES[0], torch.bfloat16, torch.float32),
        (SHAPES[1], torch.bfloat16, torch.bfloat16),
        (SHAPES[2], torch.float16, torch.float32),
        (SHAPES[0], torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_ids_are_equal_in_half_precision_up_to_ties(shape, dtype, base_dtype, device):
    for seed in range(3):
        inputs = make_choice(shape, dtype, device, base_dtype, seed)
        ours, theirs = choose_both(*inputs)
        assert ours.dtype == torch.int64
        assert_equal_up_to_ties(ours, theirs, *inputs)
        assert dtype != torch.float32 or torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [1, 7, 128, 333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_ids_are_equal(size, dtype, device):
    base, *others = make_choice((3, 333, 17), dtype, device)
    logits, ids = make_pool(base, size)
    ours, theirs = choose_both(logits, *others, ids)
    assert_equal_up_to_ties(ours, theirs, base, *others)
    assert (ids == ours[:, None]).any(dim=1).all()
    if dtype == torch.float32:
        assert torch.equal(ours, theirs)
        assert size < 333 or torch.equal(ours, choose_both(base, *others)[1])  # of all tokens: as without a pool


@pytest.mark.parametrize(("dtype", "base_dtype"), ROUNDED, ids=str)
@pytest.mark.parametrize("with_pool", [False, True], ids=["vocabulary", "pool"])
def test_scores_are_rounded_where_it_is_said(with_pool, dtype, base_dtype, device):
    """Before a token with the same logit and no correction, a token is chosen; one that is rounded down is not."""
    base, low_rank, up_weight = make_choice((24, 1, 17), dtype, device, base_dtype)
    logits = torch.cat((base, round_corrected(base[:, 0], low_rank, up_weight)[:, None]), dim=1)
    pool = (torch.tensor([[0, 1]] * 24, device=device),) if with_pool else ()
    for chosen in choose_both(logits, low_rank, torch.cat((up_weight, torch.zeros_like(up_weight))), *pool):
        assert chosen.sum() <= 1  # where another order of the fp32 sum tips a rounding over


def test_inputs_may_be_slices(device):
    base, low_rank, up_weight = make_choice((4, 333, 17), torch.float32, device)
    wide = torch.cat((up_weight, up_weight), dim=1)[:, :17]
    assert torch.equal(*choose_both(base[::2], low_rank[::2], wide))
    logits, ids = make_pool(base, 40)
    assert torch.equal(*choose_both(logits[1::2], low_rank[1::2], up_weight, ids[1::2]))


@pytest.mark.parametrize("first", [0, 63, 64, 130, 998])
def test_the_first_of_equal_logits_wins(first, device):
    base, low_rank, up_weight = make_choice((2, 1000, 48), torch.float32, device)
    base.fill_(-1.0), up_weight.zero_()
    base[0, [first, 999]] = 5.0
    base[1] = 5.0
    ids = torch.arange(999, -1, -1, device=device).expand(2, -1)  # of candidates, too
    for inputs, expected in (((base,), [first, 0]), ((base.flip(1), ids), [999, 999])):
        for chosen in choose_both(inputs[0], low_rank, up_weight, *inputs[1:]):
            assert chosen.tolist() == expected


def test_forbidden_tokens_are_not_chosen_and_nan_counts_as_the_largest(device):
    base, *others = make_choice((5, 333, 17), torch.float32, device)
    base[0, 1:] = base[1, :-1] = base[2] = -torch.inf
    base[3, 200] = base[4] = torch.nan
    noise = make_noise(5, 333, device)
    noise[:3, [5, 9]] = 0.0  # would win, were they not forbidden
    for options in ({}, {"noise": noise}, {"noise": noise, "temperature": 0.5}):
        for chosen in choose_both(base, *others, **options):
            assert chosen.tolist() == [0, 332, 0, 200, 0]
    ids = torch.tensor([[9, 5, 0], [5, 332, 9], [9, 5, 7], [1, 200, 2], [8, 5, 7]], device=device)
    for chosen in choose_both(base.gather(1, ids), *others, ids, noise=noise):
        assert chosen.tolist() == [0, 332, 9, 200, 8]


@pytest.mark.parametrize("temperature", [None, 0.3, 5.0])
def test_sampled_ids_are_equal(temperature, device):
    base, low_rank, up_weight = make_choice((3, 333, 17), torch.float32, device)
    logits, ids = make_pool(base, 150)
    scores = base + torch.nn.functional.silu(low_rank) @ up_weight.T
    allowed = torch.full_like(scores, -torch.inf).scatter(1, ids, scores.gather(1, ids))
    # As the noise of one position among others lies in memory.
    noise = torch.stack((make_noise(3, 333, device), torch.full_like(base, torch.nan)), dim=1)[:, 0]
    for inputs, possible in [((base, low_rank, up_weight), scores), ((logits, low_rank, up_weight, ids), allowed)]:
        probs = (possible / (temperature or 1.0)).softmax(dim=1)
        for chosen in choose_both(*inputs, noise=noise, temperature=temperature):
            assert torch.equal(chosen, (probs / noise).argmax(dim=1))


def test_draws_are_those_of_multinomial():
    base, low_rank, up_weight = make_choice((20, 333, 17), torch.float32, "cpu")
    probs = (base + torch.nn.functional.silu(low_rank) @ up_weight.T).softmax(dim=1)
    torch.manual_seed(3)
    expected = torch.multinomial(probs, 1)[:, 0]
    torch.manual_seed(3)
    for chosen in choose_both(base, low_rank, up_weight, noise=torch.empty_like(base).exponential_()):
        assert torch.equal(chosen, expected)
