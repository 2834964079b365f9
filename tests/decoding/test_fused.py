"""The rollout by fused kernels chooses what the one in PyTorch does."""

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import domino_kernels
from hf_domino.decoding.correcting import fused
from hf_domino.decoding.correcting.corrections import Corrections
from hf_domino.decoding.correcting.fused import choose_fused, fits_kernels
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.target.view import TargetModel

pytest.importorskip("triton")
GREEDY = TokenLaw(LogitsProcessorList())


def make(target, **overrides):
    """A drafter with strong corrections, its target, random draft hidden states and prefixes of two rows."""
    drafter = build_drafter(target, **overrides)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    torch.manual_seed(5)
    hidden = 0.3 * torch.randn(2, drafter.config.num_draft_tokens, drafter.config.hidden_size)
    prefixes = Prefixes(torch.randint(4, VOCAB_SIZE, (2, 11)), [11, 8], [0, 1])
    return drafter, TargetModel(target, drafter.config), hidden, prefixes


@torch.no_grad()
@pytest.mark.parametrize("pool_size", [None, 5, VOCAB_SIZE])
@pytest.mark.parametrize(
    "overrides", [{}, {"pure_draft_prefix_len": 2}, {"shift_label": False}], ids=["", "prefix", "unshifted"]
)
def test_proposals_are_equal(tiny_qwen3, pool_size, overrides):
    block = make(tiny_qwen3, draft_pool_size=pool_size, **overrides)
    expected = rollout(*block, GREEDY)
    with domino_kernels.use_backend("triton"):
        assert torch.equal(rollout(*block, GREEDY), expected)


@torch.no_grad()
@pytest.mark.parametrize(("pool_size", "temperature"), [(None, 3.0), (5, None)])
def test_draws_win_the_race(tiny_qwen3, pool_size, temperature):
    drafter, target, hidden, prefixes = make(tiny_qwen3, draft_pool_size=pool_size, pure_draft_prefix_len=2)
    logits, anchors = target.logits(hidden), prefixes.last()[:, 0]
    noise = torch.empty_like(logits).exponential_()
    with domino_kernels.use_backend("triton"):
        greedy = choose_fused(drafter, target, hidden, logits, anchors)
        tokens = choose_fused(drafter, target, hidden, logits, anchors, noise=noise, temperature=temperature)
    corrections = Corrections(drafter, target, hidden, anchors)
    for position in tokens[:, :-1].T:
        corrections.read(position)
    scores = corrections.apply_to_all(logits)
    if pool_size is not None:
        likely = (logits - noise.log().clamp_max(0.0)).topk(pool_size).indices  # what noise favours included
        outside = torch.ones_like(scores, dtype=torch.bool).scatter(2, likely, False)
        scores = scores.masked_fill(outside, -torch.inf)
    probs = (scores / (temperature or 1.0)).softmax(dim=2)
    assert torch.equal(tokens, (probs / noise).argmax(dim=2))
    assert (tokens != greedy).any()


@torch.no_grad()
def test_output_is_that_of_the_target_alone(tiny_qwen3, tiny_drafter, monkeypatch):
    prompt = torch.randint(4, VOCAB_SIZE, (1, 9))
    arguments = {"max_new_tokens": 6, "do_sample": False}
    calls = []
    choose = fused.correct_and_choose
    monkeypatch.setattr(
        fused, "correct_and_choose", lambda *inputs, **options: calls.append(1) or choose(*inputs, **options)
    )
    with domino_kernels.use_backend("triton"):
        output = tiny_qwen3.generate(prompt, assistant_model=tiny_drafter, **arguments)
    assert calls
    assert torch.equal(output, tiny_qwen3.generate(prompt, **arguments))


@torch.no_grad()
def test_drawn_proposals_are_equal(tiny_qwen3):
    block, noise = make(tiny_qwen3, draft_pool_size=5), torch.empty(2, 6, VOCAB_SIZE).exponential_()
    law = TokenLaw(LogitsProcessorList([TemperatureLogitsWarper(0.5)]))
    expected = rollout(*block, law, noise)
    with domino_kernels.use_backend("triton"):
        assert fits_kernels(block[0], law, noise, noise)
        assert torch.equal(rollout(*block, law, noise), expected)


def test_only_plain_choices_fit(tiny_qwen3):
    drafter, logits = build_drafter(tiny_qwen3), torch.zeros(1, 5, VOCAB_SIZE)
    assert not fits_kernels(drafter, GREEDY, logits)  # on a CPU
    warped = TokenLaw(LogitsProcessorList([TemperatureLogitsWarper(0.5)]))
    with domino_kernels.use_backend("triton"):
        assert fits_kernels(drafter, GREEDY, logits)
        assert not fits_kernels(drafter, warped, logits)
        assert fits_kernels(drafter, GREEDY, logits, torch.ones_like(logits))
        top_k = TokenLaw(LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)]))
        assert not fits_kernels(drafter, top_k, logits, torch.ones_like(logits))
        assert not fits_kernels(build_drafter(tiny_qwen3, projector_type="dflash"), GREEDY, logits)


@torch.no_grad()
def test_gru_steps_by_kernel(tiny_drafter):
    gru, embeds, state = tiny_drafter.prefix_gru, torch.randn(2, 32), torch.rand(2, 16)
    expected = gru.step(embeds, state)
    with domino_kernels.use_backend("triton"):
        torch.testing.assert_close(gru.step(embeds, state), expected, atol=2e-6, rtol=0)  # fp32, another order
