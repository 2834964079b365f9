"""`correct_and_choose`: the kernel against its twin, and both against what they promise."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal_up_to_ties, choose_both, make_choice, make_pool

from domino_kernels import noise, triton_noise

SHAPES = [(1, 1000, 48), (2, 333, 17), (3, 64, 5), (2, 1, 1), (1, 129, 256)]  # B, V, R: few of them fit the tiles


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32_ids_are_equal(shape, device):
    for seed in range(3):
        inputs = make_choice(shape, torch.float32, device, seed=seed)
        ours, theirs = choose_both(*inputs)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_half_precision_ids_are_equal_up_to_ties(shape, dtype, base_dtype, device):
    for seed in range(3):
        inputs = make_choice(shape, dtype, device, base_dtype, seed)
        assert_equal_up_to_ties(*choose_both(*inputs), *inputs)


@pytest.mark.parametrize("size", [1, 7, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_ids_are_equal(size, dtype, device):
    base, low_rank, up_weight = make_choice((3, 333, 17), dtype, device)
    logits, ids = make_pool(base, size)
    ours, theirs = choose_both(logits, low_rank, up_weight, ids)
    assert_equal_up_to_ties(ours, theirs, base, low_rank, up_weight)
    assert (ids == ours[:, None]).any(dim=1).all()
    if dtype == torch.float32:
        assert torch.equal(ours, theirs)


def test_pool_of_all_tokens_is_the_vocabulary(device):
    base, low_rank, up_weight = make_choice((2, 200, 17), torch.float32, device)
    logits, ids = make_pool(base, 200)
    for chosen in choose_both(logits, low_rank, up_weight, ids):
        assert torch.equal(chosen, choose_both(base, low_rank, up_weight)[1])


def test_inputs_may_be_slices(device):
    base, low_rank, up_weight = make_choice((4, 333, 17), torch.float32, device)
    wide = torch.cat((up_weight, up_weight), dim=1)[:, :17]
    ours, theirs = choose_both(base[::2], low_rank[::2], wide)
    assert torch.equal(ours, theirs)
    logits, ids = make_pool(base, 40)
    assert torch.equal(*choose_both(logits[1::2], low_rank[1::2], up_weight, ids[1::2]))


@pytest.mark.parametrize("first", [0, 63, 64, 130, 998])
def test_the_first_of_equal_logits_wins(first, device):
    base, low_rank, up_weight = make_choice((2, 1000, 48), torch.float32, device)
    base.fill_(-1.0), up_weight.zero_()
    base[0, [first, 999]] = 5.0
    base[1] = 5.0
    ours, theirs = choose_both(base, low_rank, up_weight)
    assert ours.tolist() == theirs.tolist() == [first, 0]


def test_the_first_of_equal_candidates_wins(device):
    _, low_rank, up_weight = make_choice((1, 300, 17), torch.float32, device)
    ids = torch.tensor([[9, 250, 4]], device=device)
    up_weight.zero_()
    logits = torch.tensor([[1.0, 2.0, 2.0]], device=device)
    assert [ids.tolist() for ids in choose_both(logits, low_rank, up_weight, ids)] == [[250], [250]]


def test_forbidden_tokens_are_not_chosen(device):
    base, low_rank, up_weight = make_choice((3, 333, 17), torch.float32, device)
    base[0, 1:] = -torch.inf
    base[1, :-1] = -torch.inf
    base[2] = -torch.inf
    ours, theirs = choose_both(base, low_rank, up_weight)
    assert ours.tolist() == theirs.tolist() == [0, 332, 0]
    random_state = torch.tensor([3, 4], device=device)
    ours, theirs = choose_both(base[:2], low_rank[:2], up_weight, temperature=0.5, random_state=random_state)
    assert ours.tolist() == theirs.tolist() == [0, 332]


def test_nan_counts_as_the_largest(device):
    base, low_rank, up_weight = make_choice((2, 333, 17), torch.float32, device)
    base[0, 200] = torch.nan
    base[1] = torch.nan
    ours, theirs = choose_both(base, low_rank, up_weight)
    assert ours.tolist() == theirs.tolist() == [200, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_sampled_ids_are_equal(temperature, device):
    base, low_rank, up_weight = make_choice((3, 333, 17), torch.float32, device)
    logits, ids = make_pool(base, 150)
    for offset in (0, 1, 2**40 + 5):
        options = {"temperature": temperature, "random_state": torch.tensor([2**35 + 11, offset], device=device)}
        assert torch.equal(*choose_both(base, low_rank, up_weight, **options))
        assert torch.equal(*choose_both(logits, low_rank, up_weight, ids, **options))


@pytest.mark.parametrize("random_state", [[0, 0], [2**35 + 11, 2**40 + 5], [-3, -7]], ids=str)
def test_noise_is_equal(random_state, device):
    random_state = torch.tensor(random_state, device=device)
    ours, theirs = triton_noise.gumbel(random_state, 2, 5000), noise.gumbel(random_state, 2, 5000)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)  # two logarithms in fp32, of numbers up to 17
    assert torch.equal(ours, triton_noise.gumbel(random_state, 2, 6000)[:, :5000])


def test_many_sampled_rows_are_equal(device):
    base, low_rank, up_weight = make_choice((1, 12, 5), torch.float32, device)
    rows = base.expand(150, -1).contiguous(), low_rank.expand(150, -1).contiguous(), up_weight
    ours, theirs = choose_both(*rows, temperature=2.0, random_state=torch.tensor([7, 0], device=device))
    assert torch.equal(ours, theirs)
    assert len(set(ours.tolist())) > 4
