"""Where a text parts from plain generation's is found, with how far from a tie that is."""

from __future__ import annotations

import copy

import pytest
import torch
from builders import PAD

from hf_domino.evaluation.benchmark.divergences import find_divergences

SEED, NEW_TOKENS = 3, 12
PROMPTS = torch.tensor([[5, 9, 33, 20, 7, 41], [5, 9, 11, 20, 7, 12]])
LAWS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 0}}


def call_of(distribution, **options):
    return {"max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "pad_token_id": PAD} | LAWS[distribution] | options


def plain(target, call):
    torch.manual_seed(SEED)
    return target.generate(PROMPTS, **call)[:, PROMPTS.shape[1] :]


@pytest.mark.parametrize("distribution", LAWS)
def test_a_token_that_is_not_the_targets(tiny_qwen3, distribution):
    """Its margin is what it lacks to be drawn, or to be the likeliest."""
    call = call_of(distribution)
    own = plain(tiny_qwen3, call)
    assert find_divergences(tiny_qwen3, {"input_ids": PROMPTS}, own, SEED, **call) == []
    tokens = own.clone()
    tokens[1, 7:] = (own[1, 7:] + 1) % 60
    (found,) = find_divergences(tiny_qwen3, {"input_ids": PROMPTS}, tokens, SEED, **call)
    assert (found["sequence"], found["position"]) == (1, 7)
    text, favour = torch.cat((PROMPTS[1], own[1, :7]))[None], torch.zeros(64)
    if distribution == "sampled":
        torch.manual_seed(SEED)
        favour = [-torch.empty(2, 64).exponential_()[1].log() for _ in range(8)][-1]
    with torch.no_grad():
        logits = tiny_qwen3(text).logits[0, -1]
    scores = logits / call.get("temperature", 1.0) + favour
    assert found["margin"] == pytest.approx(float(scores[own[1, 7]] - scores[tokens[1, 7]]), rel=1e-3)
    assert 0 < found["tie"] < found["margin"]
    assert found["tie"] == pytest.approx(4 * 2**-23 * float(logits.abs().max()), rel=1e-3)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_text_that_ends_in_the_wrong_place_is_no_tie(tiny_qwen3, is_short):
    own = plain(tiny_qwen3, call_of("greedy"))
    call = call_of("greedy", max_new_tokens=NEW_TOKENS if is_short else 5)
    tokens = own[:, :5] if is_short else own
    found = find_divergences(tiny_qwen3, {"input_ids": PROMPTS}, tokens, SEED, **call)
    assert [(at["sequence"], at["position"], at["margin"]) for at in found] == [(0, 5, None), (1, 5, None)]


def test_padding_is_no_text(tiny_qwen3, monkeypatch):
    own = plain(tiny_qwen3, call_of("greedy"))
    end = next(token for token in own[0].tolist() if token not in own[1].tolist())
    monkeypatch.setattr(tiny_qwen3.generation_config, "eos_token_id", end)
    call = call_of("greedy", eos_token_id=end)
    own = plain(tiny_qwen3, call)
    assert PAD in own[0]
    tokens = torch.where(own == PAD, 7, own)
    assert find_divergences(tiny_qwen3, {"input_ids": PROMPTS}, tokens, SEED, **call) == []


def test_in_bf16_roundings_are_larger(tiny_qwen3):
    target, call = copy.deepcopy(tiny_qwen3).bfloat16(), call_of("greedy")
    tokens = (plain(target, call) + 1) % 60
    assert find_divergences(target, {"input_ids": PROMPTS}, tokens, SEED, **call)[0]["tie"] > 0.001
