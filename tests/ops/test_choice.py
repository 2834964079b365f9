"""`correct_and_choose`: the kernel against its twin, and both against what they promise."""

from __future__ import annotations

import pytest
import torch

import domino_kernels
from domino_kernels import correct_and_choose

# The kernel and PyTorch sum in another order. Where that tips a rounding over, a correction is one ulp off, in the
# worst case for both of the tokens compared. (Triton's interpreter, besides, cuts bf16 off; a GPU rounds to nearest.)
MAX_TIE_ULPS = 2
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = [(1, 1000, 48), (2, 333, 17), (3, 64, 5), (2, 1, 1), (1, 129, 256)]  # B, V, R: few of them fit the tiles


def make(shape, dtype, device, base_dtype=torch.float32, seed=0):
    """Base logits `[B, V]`, low-rank pre-activations `[B, R]` and W2 `[V, R]`; corrections as large as the logits."""
    num_rows, vocab_size, rank = shape
    generator = torch.Generator().manual_seed(seed)
    base = 4 * torch.randn(num_rows, vocab_size, generator=generator)
    low_rank = torch.randn(num_rows, rank, generator=generator)
    up_weight = 8 * torch.randn(vocab_size, rank, generator=generator) / rank**0.5
    return base.to(device, base_dtype), low_rank.to(device, dtype), up_weight.to(device, dtype)


def make_pool(base, size, seed=1):
    """Distinct candidates `[B, M]` in no order, and their base logits."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(base.shape[1], generator=generator)[:size] for _ in base]).to(base.device)
    return base.gather(1, ids), ids


def both(*inputs, **options):
    """The ids of the kernel and of its twin."""
    with domino_kernels.use_backend("triton"):
        ours = correct_and_choose(*inputs, **options)
    with domino_kernels.use_backend("reference"):
        return ours, correct_and_choose(*inputs, **options)


def assert_equal_up_to_ties(ours, theirs, base, low_rank, up_weight):
    """Ids `[B]` are equal, or their exact logits differ by no more than rounding explains."""
    correction = torch.nn.functional.silu(low_rank).double() @ up_weight.double().T
    exact = base.double() + correction
    first, second = (exact.gather(1, ids[:, None])[:, 0] for ids in (ours, theirs))
    eps = max(EPS[up_weight.dtype], EPS[base.dtype])
    scale = torch.maximum(exact.abs().amax(1), correction.abs().amax(1))
    assert torch.all((ours == theirs) | ((first - second).abs() <= MAX_TIE_ULPS * eps * scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32_ids_are_equal(shape, device):
    for seed in range(3):
        inputs = make(shape, torch.float32, device, seed=seed)
        ours, theirs = both(*inputs)
        assert ours.dtype == torch.int64
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_half_precision_ids_are_equal_up_to_ties(shape, dtype, base_dtype, device):
    for seed in range(3):
        inputs = make(shape, dtype, device, base_dtype, seed)
        assert_equal_up_to_ties(*both(*inputs), *inputs)


@pytest.mark.parametrize("size", [1, 7, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_ids_are_equal(size, dtype, device):
    base, low_rank, up_weight = make((3, 333, 17), dtype, device)
    logits, ids = make_pool(base, size)
    ours, theirs = both(logits, low_rank, up_weight, ids)
    assert_equal_up_to_ties(ours, theirs, base, low_rank, up_weight)
    assert (ids == ours[:, None]).any(dim=1).all()
    if dtype == torch.float32:
        assert torch.equal(ours, theirs)


def test_pool_of_all_tokens_is_the_vocabulary(device):
    base, low_rank, up_weight = make((2, 200, 17), torch.float32, device)
    logits, ids = make_pool(base, 200)
    for chosen in both(logits, low_rank, up_weight, ids):
        assert torch.equal(chosen, both(base, low_rank, up_weight)[1])


def test_inputs_may_be_slices(device):
    base, low_rank, up_weight = make((4, 333, 17), torch.float32, device)
    wide = torch.cat((up_weight, up_weight), dim=1)[:, :17]
    ours, theirs = both(base[::2], low_rank[::2], wide)
    assert torch.equal(ours, theirs)
    logits, ids = make_pool(base, 40)
    assert torch.equal(*both(logits[1::2], low_rank[1::2], up_weight, ids[1::2]))


@pytest.mark.parametrize("first", [0, 63, 64, 130, 998])
def test_the_first_of_equal_logits_wins(first, device):
    base, low_rank, up_weight = make((2, 1000, 48), torch.float32, device)
    base.fill_(-1.0), up_weight.zero_()
    base[0, [first, 999]] = 5.0
    base[1] = 5.0
    ours, theirs = both(base, low_rank, up_weight)
    assert ours.tolist() == theirs.tolist() == [first, 0]


def test_the_first_of_equal_candidates_wins(device):
    _, low_rank, up_weight = make((1, 300, 17), torch.float32, device)
    ids = torch.tensor([[9, 250, 4]], device=device)
    up_weight.zero_()
    logits = torch.tensor([[1.0, 2.0, 2.0]], device=device)
    assert [ids.tolist() for ids in both(logits, low_rank, up_weight, ids)] == [[250], [250]]


def test_forbidden_tokens_are_not_chosen(device):
    base, low_rank, up_weight = make((3, 333, 17), torch.float32, device)
    base[0, 1:] = -torch.inf
    base[1, :-1] = -torch.inf
    base[2] = -torch.inf
    ours, theirs = both(base, low_rank, up_weight)
    assert ours.tolist() == theirs.tolist() == [0, 332, 0]
    random_state = torch.tensor([3, 4], device=device)
    ours, theirs = both(base[:2], low_rank[:2], up_weight, temperature=0.5, random_state=random_state)
    assert ours.tolist() == theirs.tolist() == [0, 332]


def test_nan_counts_as_the_largest(device):
    base, low_rank, up_weight = make((2, 333, 17), torch.float32, device)
    base[0, 200] = torch.nan
    base[1] = torch.nan
    ours, theirs = both(base, low_rank, up_weight)
    assert ours.tolist() == theirs.tolist() == [200, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_sampled_ids_are_equal(temperature, device):
    base, low_rank, up_weight = make((3, 333, 17), torch.float32, device)
    logits, ids = make_pool(base, 150)
    for offset in (0, 1, 2**40 + 5):
        options = {"temperature": temperature, "random_state": torch.tensor([2**35 + 11, offset], device=device)}
        assert torch.equal(*both(base, low_rank, up_weight, **options))
        assert torch.equal(*both(logits, low_rank, up_weight, ids, **options))


def test_many_sampled_rows_are_equal(device):
    base, low_rank, up_weight = make((1, 12, 5), torch.float32, device)
    rows = base.expand(150, -1).contiguous(), low_rank.expand(150, -1).contiguous(), up_weight
    ours, theirs = both(*rows, temperature=2.0, random_state=torch.tensor([7, 0], device=device))
    assert torch.equal(ours, theirs)
    assert len(set(ours.tolist())) > 4
