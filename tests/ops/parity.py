"""Inputs for kernel and reference, both their results, and how equal these must be."""

from __future__ import annotations

import functools

import torch

import domino_kernels
from domino_kernels import advance_branches, correct_and_choose, correct_branches, gru_step

# The kernel and PyTorch sum in another order. Where that tips a rounding over, a correction is one ulp off, in the
# worst case for both of the tokens compared. (Triton's interpreter, besides, cuts bf16 off; a GPU rounds to nearest.)
MAX_TIE_ULPS = 2
FP32_SUM_ULPS = 8  # nothing is rounded to fewer bits: the order of a sum over the low rank shows, 3.6 on an H200
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# fp32: another order of summation. Half precision: PyTorch rounds the two halves of each gate, the kernel does not;
# three roundings at magnitudes up to 4 move a state in (-1, 1) by a few of its ulps.
# W2 and base logits of which what is rounded shows. Not bf16, which Triton's interpreter cuts off.
ROUNDED = [(torch.float16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float16)]
MOST_TIPPED = 0.02  # share of numbers that another order of an fp32 sum may round to the other side
STATE_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def normal(seed):
    """A source of standard normal numbers, the same for a seed."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))


def make_choice(shape, dtype, device, base_dtype=torch.float32, seed=0):
    """Base logits `[B, V]`, low-rank pre-activations `[B, R]` and W2 `[V, R]`; corrections as large as the logits."""
    num_rows, vocab_size, rank = shape
    draw = normal(seed)
    base, low_rank, up_weight = 4 * draw(num_rows, vocab_size), draw(num_rows, rank), 8 * draw(vocab_size, rank)
    return base.to(device, base_dtype), low_rank.to(device, dtype), (up_weight / rank**0.5).to(device, dtype)


def make_pool(base, size, seed=1):
    """Distinct candidates `[B, M]` in no order, and their base logits."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(base.shape[1], generator=generator)[:size] for _ in base]).to(base.device)
    return base.gather(1, ids), ids


def make_noise(num_rows, vocab_size, device, seed=2):
    """Standard exponential noise `[B, V]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(num_rows, vocab_size).exponential_(generator=generator).to(device)


def both(operation, *inputs, **options):
    """What the kernel and its reference give."""
    with domino_kernels.use_backend("triton"):
        ours = operation(*inputs, **options)
    with domino_kernels.use_backend("reference"):
        return ours, operation(*inputs, **options)


choose_both = functools.partial(both, correct_and_choose)
step_both = functools.partial(both, gru_step)
advance_both = functools.partial(both, advance_branches)
correct_both = functools.partial(both, correct_branches)


def assert_equal_up_to_ties(ours, theirs, base, low_rank, up_weight):
    """Ids `[B]` are equal, or their exact logits differ by no more than rounding explains."""
    correction = torch.nn.functional.silu(low_rank).double() @ up_weight.double().T
    exact = base.double() + correction
    first, second = (exact.gather(1, ids[:, None])[:, 0] for ids in (ours, theirs))
    eps = max(EPS[up_weight.dtype], EPS[base.dtype])
    scale = torch.maximum(exact.abs().amax(1), correction.abs().amax(1))
    assert torch.all((ours == theirs) | ((first - second).abs() <= MAX_TIE_ULPS * eps * scale))


def make_gru(shape, dtype, device, seed=0):
    """Embeddings `[B, H]`, state `[B, G]`, weights `[3G, H]` and `[3G, G]`."""
    num_rows, input_size, num_units = shape
    draw = normal(seed)
    embeds, state = draw(num_rows, input_size), draw(num_rows, num_units).tanh()
    weight_ih, weight_hh = (draw(3 * num_units, size) / size**0.5 for size in (input_size, num_units))
    return tuple(tensor.to(device, dtype) for tensor in (embeds, state, weight_ih, weight_hh))


def make_advance(shape, dtype, device, seed=0):
    """Input products `[B, L, 3G]`, states `[B, S, G]`, owners `[B, L]` and a weight `[3G, G]`."""
    num_rows, num_branches, num_before, num_units = shape
    draw = normal(seed)
    products, state = draw(num_rows, num_branches, 3 * num_units), draw(num_rows, num_before, num_units).tanh()
    weight_hh = draw(3 * num_units, num_units) / num_units**0.5
    owners = torch.randint(num_before, (num_rows, num_branches), generator=torch.Generator().manual_seed(seed))
    return products.to(device, dtype), state.to(device, dtype), owners.to(device), weight_hh.to(device, dtype)


def make_corrections(shape, dtype, device, base_dtype=torch.float32, seed=0):
    """Candidates' base logits `[B, M]`, parts of the low rank `[B, R]` and `[B, L, R]`, W2 and candidates `[B, M]`."""
    num_rows, num_branches, size, vocab_size, rank = shape
    base, block_part, up_weight = make_choice((num_rows, vocab_size, rank), dtype, device, base_dtype, seed)
    logits, ids = make_pool(base, size)
    return logits, block_part, normal(seed + 1)(num_rows, num_branches, rank).to(device, dtype), up_weight, ids


def round_corrected(base, low_rank, rows):
    """Corrected logits, rounded where the operations say: base logits `[N]`, low rank `[N, R]`, rows of W2 `[N, R]`."""
    activated = torch.nn.functional.silu(low_rank.double()).to(rows.dtype)
    correction = (activated.double() * rows.double()).sum(dim=-1).to(rows.dtype)
    return (base.double() + correction.double()).to(base.dtype)


def assert_equal_corrections(ours, theirs, base, up_weight):
    """Corrected logits `[B, L, M]` are equal but for an ulp of the correction and one of the sum."""
    scale = theirs.float().abs().max() + base.float().abs().max()
    ulps = FP32_SUM_ULPS if up_weight.dtype == base.dtype == torch.float32 else MAX_TIE_ULPS
    atol = ulps * max(EPS[up_weight.dtype], EPS[base.dtype]) * scale.item()
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
