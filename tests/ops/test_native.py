"""The kernels on a GPU, at the sizes of the Qwen3-8B drafter: parity, and draws that a CUDA graph repeats."""

from __future__ import annotations

import pytest
import torch
from parity import (
    STATE_TOLERANCE,
    advance_both,
    assert_equal_corrections,
    assert_equal_up_to_ties,
    choose_both,
    correct_both,
    make_advance,
    make_choice,
    make_corrections,
    make_gru,
    make_noise,
    step_both,
)

import domino_kernels
from domino_kernels import advance_branches, correct_and_choose, correct_branches

pytestmark = pytest.mark.gpu
HIDDEN, STATE, RANK, VOCABULARY, POOL, BRANCHES = 4096, 1024, 256, 151936, 128, 8
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
each_number_of_rows = pytest.mark.parametrize("num_rows", [1, 3, 8])


@each_dtype
@each_number_of_rows
def test_choice_from_the_vocabulary(num_rows, dtype):
    inputs = make_choice((num_rows, VOCABULARY, RANK), dtype, "cuda")
    assert_equal_up_to_ties(*choose_both(*inputs), *inputs)


@each_dtype
def test_choice_from_a_pool(dtype):
    base, *others = make_choice((3, VOCABULARY, RANK), dtype, "cuda")
    logits, ids = base.topk(POOL, dim=1)
    ours, theirs = choose_both(logits, *others, ids)
    assert_equal_up_to_ties(ours, theirs, base, *others)
    assert (ids == ours[:, None]).any(dim=1).all()


def test_draws():
    base, low_rank, up_weight = make_choice((3, VOCABULARY, RANK), torch.float32, "cuda")
    equal = 0
    for seed in range(20):
        ours, theirs = choose_both(base, low_rank, up_weight, noise=make_noise(3, VOCABULARY, "cuda", seed))
        equal += (ours == theirs).sum().item()
    assert equal >= 59  # of 60: logarithms of two libraries may order a near-tie differently


@each_dtype
@each_number_of_rows
def test_states(num_rows, dtype):
    inputs = make_gru((num_rows, HIDDEN, STATE), dtype, "cuda")
    # fp32 matrix products of PyTorch on a GPU sum 4096 terms in another order still
    tolerance = max(1e-5, STATE_TOLERANCE[dtype])
    torch.testing.assert_close(*step_both(*inputs), atol=tolerance, rtol=0)


def test_a_graph_draws_anew_when_its_noise_is_refilled():
    base, low_rank, up_weight = make_choice((1, VOCABULARY, RANK), torch.bfloat16, "cuda")
    noise = make_noise(1, VOCABULARY, "cuda")

    def draw():
        return correct_and_choose(base, low_rank, up_weight, noise=noise, temperature=8.0)

    with domino_kernels.use_backend("triton"):
        draw()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chosen = draw()
        seen = set()
        for _ in range(20):
            noise.exponential_()
            graph.replay()
            assert chosen.item() == draw().item()
            seen.add(chosen.item())
    assert len(seen) > 10


@each_dtype
@each_number_of_rows
def test_branches(num_rows, dtype):
    states = advance_both(*make_advance((num_rows, BRANCHES, BRANCHES, STATE), dtype, "cuda"))
    torch.testing.assert_close(*states, atol=max(1e-5, STATE_TOLERANCE[dtype]), rtol=0)  # as above
    inputs = make_corrections((num_rows, BRANCHES, POOL, VOCABULARY, RANK), dtype, "cuda")
    assert_equal_corrections(*correct_both(*inputs), inputs[0], inputs[3])


def test_a_graph_grows_a_depth_anew_from_other_owners():
    products, state, owners, weight_hh = make_advance((2, BRANCHES, BRANCHES, STATE), torch.bfloat16, "cuda")
    base, block_part, _, up_weight, ids = make_corrections(
        (2, BRANCHES, POOL, VOCABULARY, RANK), torch.bfloat16, "cuda"
    )

    def grow():
        states = advance_branches(products, state, owners, weight_hh)
        return states, correct_branches(base, block_part, states[..., :RANK], up_weight, ids)

    with domino_kernels.use_backend("triton"):
        grow()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grown = grow()
        for _ in range(3):
            owners.random_(BRANCHES)
            ids.random_(VOCABULARY)
            graph.replay()
            assert all(torch.equal(found, expected) for found, expected in zip(grown, grow(), strict=True))
