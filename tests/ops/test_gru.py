"""`gru_step`: the kernel against its reference, and the reference against `torch.nn.GRU`."""

from __future__ import annotations

import pytest
import torch
from parity import STATE_TOLERANCE, make_gru, step_both

import domino_kernels
from domino_kernels import gru_step

# Of numbers below 1: half an ulp, but Triton's interpreter cuts bf16 off.
ROUNDING = {torch.bfloat16: 2.0**-9 if torch.cuda.is_available() else 2.0**-8, torch.float16: 2.0**-12}
SHAPES = [(1, 50, 21), (2, 33, 16), (3, 128, 7), (1, 1, 1), (2, 1500, 3)]  # B, H, G: few of them fit the tiles


@pytest.mark.filterwarnings("ignore:overflow")  # of exp, in the interpreter
@pytest.mark.parametrize("dtype", list(STATE_TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_are_equal(shape, dtype, device):
    embeds, *others = make_gru(shape, dtype, device)
    for inputs in (embeds, 1e4 * embeds):  # large gates saturate
        ours, theirs = step_both(inputs, *others)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=STATE_TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_half_precision_rounds_once(dtype, device):
    inputs = make_gru((2, 33, 16), dtype, device)
    with domino_kernels.use_backend("triton"):
        ours = gru_step(*inputs)
    exact = torch.gru_cell(*(tensor.double() for tensor in inputs))
    assert (ours.double() - exact).abs().max() <= 1.01 * ROUNDING[dtype]


def test_ids_are_looked_up(device):
    table, state, *weights = make_gru((40, 50, 21), torch.float32, device)
    ids = torch.tensor([39, 0, 7], device=device)
    expected = step_both(table[ids], state[:3], *weights)[1]
    for step in step_both(ids, state[:3], *weights, table):
        torch.testing.assert_close(step, expected, atol=2e-6, rtol=0)


def test_inputs_may_be_slices(device):
    embeds, state, weight_ih, weight_hh = make_gru((4, 50, 21), torch.float32, device)
    wide = torch.cat((weight_ih, weight_ih), dim=1)[:, :50]
    torch.testing.assert_close(*step_both(embeds[::2], state[::2], wide, weight_hh), atol=2e-6, rtol=0)
    ids = torch.arange(8, device=device)[::4]
    torch.testing.assert_close(*step_both(ids, state[:2], wide, weight_hh, embeds.repeat(2, 1)), atol=2e-6, rtol=0)


def test_steps_are_those_of_nn_gru(device):
    gru = torch.nn.GRU(50, 21, bias=False, batch_first=True).to(device)
    tokens, state = torch.randn(2, 3, 50, device=device), torch.zeros(2, 21, device=device)
    with torch.no_grad():
        expected, _ = gru(tokens)
        for index in range(tokens.shape[1]):
            state, reference = step_both(tokens[:, index], state, gru.weight_ih_l0, gru.weight_hh_l0)
            torch.testing.assert_close(state, expected[:, index], atol=1e-5, rtol=0)  # errors of three steps
            torch.testing.assert_close(reference, state, atol=STATE_TOLERANCE[torch.float32], rtol=0)
