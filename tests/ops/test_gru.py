"""`gru_step`: the kernel against its twin, and the twin against `torch.nn.GRU`."""

from __future__ import annotations

import pytest
import torch

import domino_kernels
from domino_kernels import gru_step

# fp32: another order of summation. Half precision: PyTorch rounds the two halves of each gate, the kernel does not;
# three roundings at magnitudes up to 4 move a state in (-1, 1) by a few of its ulps.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Of numbers below 1: half an ulp, but Triton's interpreter cuts bf16 off.
ROUNDING = {torch.bfloat16: 2.0**-9 if torch.cuda.is_available() else 2.0**-8, torch.float16: 2.0**-12}
SHAPES = [(1, 50, 21), (2, 33, 16), (3, 128, 7), (1, 1, 1), (2, 1500, 3)]  # B, H, G: few of them fit the tiles


def make(shape, dtype, device, seed=0):
    """Embeddings `[B, H]`, state `[B, G]`, weights `[3G, H]` and `[3G, G]`."""
    num_rows, input_size, num_units = shape
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(num_rows, input_size, generator=generator)
    state = 2 * torch.rand(num_rows, num_units, generator=generator) - 1
    weight_ih = torch.randn(3 * num_units, input_size, generator=generator) / input_size**0.5
    weight_hh = torch.randn(3 * num_units, num_units, generator=generator) / num_units**0.5
    return tuple(tensor.to(device, dtype) for tensor in (embeds, state, weight_ih, weight_hh))


def both(*inputs):
    """The next states of the kernel and of its twin."""
    with domino_kernels.use_backend("triton"):
        ours = gru_step(*inputs)
    with domino_kernels.use_backend("reference"):
        return ours, gru_step(*inputs)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_equal(shape, dtype, device):
    ours, theirs = both(*make(shape, dtype, device))
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_half_precision_rounds_once(dtype, device):
    inputs = make((2, 33, 16), dtype, device)
    with domino_kernels.use_backend("triton"):
        ours = gru_step(*inputs)
    exact = torch.gru_cell(*(tensor.double() for tensor in inputs))
    assert (ours.double() - exact).abs().max() <= 1.01 * ROUNDING[dtype]


def test_ids_are_looked_up(device):
    table, state, weight_ih, weight_hh = make((40, 50, 21), torch.float32, device)
    state = state[:3]
    ids = torch.tensor([39, 0, 7], device=device)
    for step in both(ids, state, weight_ih, weight_hh, table):
        torch.testing.assert_close(step, both(table[ids], state, weight_ih, weight_hh)[1], atol=2e-6, rtol=0)


def test_inputs_may_be_slices(device):
    embeds, state, weight_ih, weight_hh = make((4, 50, 21), torch.float32, device)
    wide = torch.cat((weight_ih, weight_ih), dim=1)[:, :50]
    torch.testing.assert_close(*both(embeds[::2], state[::2], wide, weight_hh), atol=2e-6, rtol=0)
    ids = torch.arange(8, device=device)[::4]
    torch.testing.assert_close(*both(ids, state[:2], wide, weight_hh, embeds.repeat(2, 1)), atol=2e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:overflow")  # of exp, in the interpreter
def test_large_gates_saturate(device):
    embeds, state, weight_ih, weight_hh = make((1, 50, 21), torch.float32, device)
    ours, theirs = both(1e4 * embeds, state, weight_ih, weight_hh)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE[torch.float32], rtol=0)


def test_steps_are_those_of_nn_gru(device):
    gru = torch.nn.GRU(50, 21, bias=False, batch_first=True).to(device)
    tokens = torch.randn(2, 5, 50, device=device)
    state = torch.zeros(2, 21, device=device)
    with torch.no_grad():
        expected, _ = gru(tokens)
        for index in range(tokens.shape[1]):
            state, twin = both(tokens[:, index], state, gru.weight_ih_l0, gru.weight_hh_l0)
            torch.testing.assert_close(state, expected[:, index], atol=1e-5, rtol=0)  # errors of five steps
            torch.testing.assert_close(twin, state, atol=TOLERANCE[torch.float32], rtol=0)
