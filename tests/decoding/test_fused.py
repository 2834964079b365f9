"""The rollout by fused kernels chooses what the one in PyTorch does."""

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from drafts import chain_of
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import domino_kernels
from domino_kernels import dispatch
from hf_domino.decoding.branches import fits_kernels
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.targets.view import TargetModel

pytest.importorskip("triton")
GREEDY, WARPED = (
    TokenDistribution(LogitsProcessorList()),
    TokenDistribution(LogitsProcessorList([TemperatureLogitsWarper(0.5)])),
)


def make(target, **overrides):
    """A drafter with strong corrections, its target, random draft hidden states and prefixes of two rows."""
    drafter = build_drafter(target, **overrides)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    torch.manual_seed(5)
    hidden = 0.3 * torch.randn(2, drafter.config.num_draft_tokens, drafter.config.hidden_size)
    prefixes = Prefixes(torch.randint(4, VOCAB_SIZE, (2, 11)), [11, 8], [0, 1])
    return drafter, TargetModel(target), hidden, prefixes


@torch.no_grad()
@pytest.mark.parametrize(
    ("pool_size", "fields"),
    [(None, {}), (5, {"pure_draft_prefix_len": 2}), (5, {"shift_label": False})],
    ids=["", "prefix", "unshifted"],
)
def test_proposals_are_equal(tiny_qwen3, pool_size, fields):
    block, noise = make(tiny_qwen3, draft_pool_size=pool_size, **fields), torch.empty(2, 6, VOCAB_SIZE).exponential_()
    for distribution, drawn in ((GREEDY, None), (WARPED, noise)):
        expected = chain_of(*block, distribution, drawn)
        with domino_kernels.use_backend("triton"):
            assert fits_kernels(block[0], distribution, noise, drawn)
            assert torch.equal(chain_of(*block, distribution, drawn), expected)


@pytest.mark.parametrize("draft_tree_size", [None, 9], ids=["chain", "tree"])
def test_output_is_that_of_the_target_alone(tiny_qwen3, draft_tree_size, monkeypatch):
    prompt, arguments, chosen = torch.randint(4, VOCAB_SIZE, (1, 9)), {"max_new_tokens": 6, "do_sample": False}, []
    drafter = build_drafter(tiny_qwen3, draft_tree_size=draft_tree_size)
    has_triton = dispatch.runs_triton
    monkeypatch.setattr(domino_kernels.ops, "runs_triton", lambda rows: chosen.append(1) or has_triton(rows))
    with domino_kernels.use_backend("triton"):
        output = tiny_qwen3.generate(prompt, assistant_model=drafter, **arguments)
    assert chosen
    assert torch.equal(output, tiny_qwen3.generate(prompt, **arguments))


def test_only_plain_choices_fit(tiny_qwen3):
    drafter, logits = build_drafter(tiny_qwen3), torch.zeros(1, 5, VOCAB_SIZE)
    assert not fits_kernels(drafter, GREEDY, logits)  # on a CPU
    with domino_kernels.use_backend("triton"):
        assert fits_kernels(drafter, GREEDY, logits)
        assert not fits_kernels(drafter, WARPED, logits)
        assert fits_kernels(drafter, GREEDY, logits, torch.ones_like(logits))
        top_k = TokenDistribution(LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)]))
        assert not fits_kernels(drafter, top_k, logits, torch.ones_like(logits))
        assert not fits_kernels(build_drafter(tiny_qwen3, projector_type="dflash"), GREEDY, logits)


@torch.no_grad()
def test_gru_steps_by_kernel(tiny_drafter):
    gru, embeds, state = tiny_drafter.prefix_gru, torch.randn(2, 32), torch.rand(2, 16)
    expected = gru.step(embeds, state)
    with domino_kernels.use_backend("triton"):
        torch.testing.assert_close(gru.step(embeds, state), expected, atol=2e-6, rtol=0)  # fp32, another order
