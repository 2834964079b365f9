"""Drafts of a few of the target's tokens: the same as if all others were impossible, and the text stays the target's.

The vocabularies here lack tokens that the target says, the end of text among them.
"""

import contextlib
import copy

import pytest
import torch
from builders import EOS, VOCAB_SIZE, build_drafter, left_padded
from drafts import chain_of
from oracle import faults, proposed
from recorded_graphs import recorded_graphs
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import domino_kernels
from hf_domino import explain_round
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.targets.view import TargetModel

IDS = [*range(4, 40, 3), *range(41, VOCAB_SIZE, 2)]
LAWS = {
    "nothing": [],
    "warpers": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(12), TopPLogitsWarper(0.9)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.7)],
    "reward": [RepetitionPenaltyLogitsProcessor(0.5)],
    "n-grams": [NoRepeatNGramLogitsProcessor(2)],
    "bias": [SequenceBiasLogitsProcessor({(7,): 4.0, (5,): 9.0, (9, 10): -3.0})],
    "length": [MinNewTokensLengthLogitsProcessor(0, 40, torch.tensor([IDS[0], EOS]))],
}


class Impossible(TargetModel):
    """A target that never says what is not in the draft vocabulary."""

    def logits(self, *arguments, **options):
        outside = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill(0, torch.tensor(IDS), False)
        return super().logits(*arguments, **options).masked_fill(outside, -torch.inf)


def blocks(target, **overrides):
    """A block of a restricted drafter, and of the drafter that it was made from over an impossible target."""
    drafter = build_drafter(target, block_size=9, **overrides)
    if drafter.has_correction_head:
        torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    torch.manual_seed(5)
    hidden = 0.3 * torch.randn(3, drafter.config.num_draft_tokens, 32)
    prefixes = Prefixes(torch.randint(4, VOCAB_SIZE, (3, 11)), [11, 11, 8], [0, 1, 2])
    return (
        (drafter.restricted(IDS), TargetModel(target), hidden, prefixes),
        (drafter, Impossible(target, drafter.config), hidden, prefixes),
    )


@torch.no_grad()
@pytest.mark.parametrize("distribution", LAWS)
@pytest.mark.parametrize("pool_size", [None, 5])
@pytest.mark.parametrize(
    "overrides", [{}, {"pure_draft_prefix_len": 2}, {"projector_type": "dflash"}], ids=["", "prefix", "dflash"]
)
def test_drafts_are_those_of_a_target_that_never_says_the_others(tiny_qwen3, distribution, pool_size, overrides):
    distribution = TokenDistribution(LogitsProcessorList(LAWS[distribution]))
    block, reference = blocks(tiny_qwen3, draft_pool_size=pool_size, **overrides)
    seen = set()
    shared = torch.empty(3, 10, VOCAB_SIZE).exponential_()
    for noise in (None, shared):
        expected = chain_of(*reference, distribution, noise)
        found = chain_of(*block, distribution, noise)
        assert torch.equal(found, expected)
        seen |= set(found.flatten().tolist())
    assert seen <= set(IDS)
    assert len(seen) > 3


@torch.no_grad()
def test_fused_kernels(tiny_qwen3):
    pytest.importorskip("triton")
    block, _ = blocks(tiny_qwen3, draft_pool_size=5, pure_draft_prefix_len=2)
    noise, distribution = torch.empty(3, 9, VOCAB_SIZE).exponential_(), TokenDistribution(LogitsProcessorList())
    for drawn in (None, noise):
        expected = chain_of(*block, distribution, drawn)
        with domino_kernels.use_backend("triton"):
            assert torch.equal(chain_of(*block, distribution, drawn), expected)


CALLS = {
    "greedy": {"do_sample": False},
    "greedy, processors": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "greedy, all tokens may be chosen": {"do_sample": False, "min_new_tokens": 12},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "sampled, warpers": {"do_sample": True, "top_k": 20, "top_p": 0.9},
    "sampled, processors": {"do_sample": True, "repetition_penalty": 1.2, "sequence_bias": [[[7], 5.0]]},
}
PROMPTS = [torch.arange(5, 17), torch.arange(30, 37), torch.arange(50, 61)]


def assert_same(target, drafter, rows, **options):
    """The text is plain generation's, from the same seed, with the drafter's own drafts and ones of all lengths."""
    ids, mask = left_padded(PROMPTS[:rows], pad=2)
    options = {"attention_mask": mask, "max_new_tokens": 24} | options
    static = options.pop("static", {})
    torch.manual_seed(3)
    plain = target.generate(ids, **options)
    assert set(plain[:, ids.shape[1] :].flatten().tolist()) - set(IDS), "the target must say what is not drafted"
    for drafting in (contextlib.nullcontext(), faults(plain.tolist(), VOCAB_SIZE)):
        torch.manual_seed(3)
        with drafting:
            text = target.generate(ids, assistant_model=drafter, **options, **static)
        assert text.tolist() == plain.tolist()


KINDS = ({}, {"draft_pool_size": None}, {"projector_type": "dflash"})


@pytest.mark.parametrize(("call", "fields", "rows"), [*zip(CALLS, 2 * KINDS, 3 * (1, 3), strict=True)])
def test_the_text_is_plain_generations(tiny_qwen3, call, fields, rows):
    assert_same(tiny_qwen3, build_drafter(tiny_qwen3, **fields).restricted(IDS), rows, **CALLS[call])


@pytest.mark.parametrize("call", CALLS)
def test_rounds_of_fixed_shape(tiny_qwen3, call):
    drafter = build_drafter(tiny_qwen3).restricted(IDS)
    with recorded_graphs():
        assert_same(tiny_qwen3, drafter, 1, static={"cache_implementation": "static"}, **CALLS[call])


def test_captured_rounds_read_weights_that_changed_in_place(tiny_llama):
    """Rows of lm_head are copies: a graph must not go on with the old ones."""
    target = copy.deepcopy(tiny_llama)
    drafter = build_drafter(target, projector_type="dflash").restricted(IDS)

    def drafts(**static):
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": -1} | static
        with proposed() as rounds:
            target.generate(PROMPTS[0][None], assistant_model=drafter, **options)
        return rounds

    with recorded_graphs() as made:
        assert drafts() == (before := drafts(cache_implementation="static"))
        with torch.no_grad():
            target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
        after = drafts(cache_implementation="static")
        assert after == drafts()
        assert after != before
        assert len(made) == 1


@pytest.mark.parametrize(
    ("options", "pool_size"),
    [({"do_sample": False}, 16), ({"do_sample": True}, None), ({"do_sample": True, "top_k": 5}, 16)],
)
def test_where_nothing_that_is_drafted_is_allowed(tiny_qwen3, options, pool_size):
    """Every second token must be one that is not drafted: no distribution of drafts is there, and no error."""
    others = sorted(set(range(4, VOCAB_SIZE)) - set(IDS))[:3]

    def allowed(row, ids):
        return others if len(ids) % 2 else IDS[:5]

    drafter = build_drafter(tiny_qwen3, draft_pool_size=pool_size).restricted(IDS)
    options = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 20, "eos_token_id": -1} | options
    torch.manual_seed(0)
    text = tiny_qwen3.generate(PROMPTS[0][None], assistant_model=drafter, **options)[0].tolist()
    assert all(token in allowed(0, text[:index]) for index, token in enumerate(text) if index >= 12)
    torch.manual_seed(0)
    assert tiny_qwen3.generate(PROMPTS[0][None], **options)[0].tolist() == text


@pytest.mark.parametrize(
    ("options", "pool_size"), [({"forced_eos_token_id": EOS}, 8), ({"suppress_tokens": IDS}, None)], ids=str
)
def test_a_warper_that_checks_the_law_where_nothing_that_is_drafted_is_allowed(tiny_qwen3, pool_size, options):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=pool_size).restricted(IDS)
    options = {"do_sample": True, "eta_cutoff": 0.01, "max_new_tokens": 20} | options
    texts = []
    for assistant in ({}, {"assistant_model": drafter}, {"assistant_model": drafter, "cache_implementation": "static"}):
        torch.manual_seed(3)
        texts.append(tiny_qwen3.generate(PROMPTS[0][None], **options, **assistant).tolist())
    assert texts[0] == texts[1] == texts[2]


def test_an_opened_round(tiny_qwen3):
    opened = explain_round(build_drafter(tiny_qwen3).restricted(IDS), tiny_qwen3, PROMPTS[0][None])
    for probs in (opened.base_probs, opened.corrected_probs):
        assert probs.shape == (6, VOCAB_SIZE)
        torch.testing.assert_close(probs[:, IDS].sum(dim=-1), torch.ones(6))
    assert torch.equal(opened.corrected_probs.argmax(dim=-1), opened.proposals)
