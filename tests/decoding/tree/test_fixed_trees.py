"""Trees in rounds of fixed shape give plain text, launched one by one and played from recordings alike."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
import torch
from builders import build_drafter
from families import build
from oracle import oracle, tree_faults
from recorded_graphs import recorded_graphs

import hf_domino

PROMPT, NEW_TOKENS, MOST_NODES = torch.arange(7, 19)[None], 29, 12
STATIC = {"cache_implementation": "static"}
LAWS = {
    "greedy": {},
    "penalised": {
        "repetition_penalty": 1.04,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [9],
        "forced_eos_token_id": 3,
    },
    "drawn": {"do_sample": True, "temperature": 0.8, "top_k": 30},
    "drawn and penalised": {"do_sample": True, "repetition_penalty": 1.3},
}
STAGES = {"backbone", "grow_tree", "target_forward", "accept", "take", "put"}


@pytest.fixture(autouse=True)
def fresh():
    """No workspace of another test, before and after."""
    hf_domino.release_workspaces()
    yield
    hf_domino.release_workspaces()


def text_of(target, drafter=None, **options):
    torch.manual_seed(5)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None} | options
    return target.generate(PROMPT, assistant_model=drafter, **options)[0].tolist()


@pytest.mark.parametrize(
    ("model_type", "distribution"),
    [("qwen3", "greedy"), ("mistral", "drawn and penalised"), ("gemma3_text", "drawn"), ("gpt2", "penalised")],
)
def test_recorded_rounds_write_plain_text(model_type, distribution):
    target = build(model_type).double()
    plain = text_of(target, **LAWS[distribution])
    drafter = build_drafter(target, draft_tree_size=MOST_NODES)
    with recorded_graphs() as made, tree_faults([plain], target.config.vocab_size, MOST_NODES):
        assert text_of(target, drafter, **STATIC, **LAWS[distribution]) == plain
        assert [recorded.names for recorded in made] == [STAGES]
    assert drafter.stats.chain is None
    most = drafter.config.num_draft_tokens
    assert set(drafter.stats.rows[0]) >= set(range(1, most + 2))  # every length of path


@pytest.mark.parametrize(
    ("distribution", "options"),
    [
        *zip(
            LAWS,
            [
                *({"projector_type": "dspark", "markov_head_type": "rnn"}, {"projector_type": "dflash"}),
                *({"draft_pool_size": None}, {"projector_type": "dflash2", "shift_label": True}),
            ],
            strict=True,
        )
    ],
)
def test_trees_are_those_of_rounds_that_grow(tiny_qwen3, distribution, options):
    drafter = build_drafter(tiny_qwen3, draft_tree_size=MOST_NODES, draft_length="full", **options)
    plain, rounds = text_of(tiny_qwen3, **LAWS[distribution]), []
    for cache in ({}, STATIC):
        with recorded_graphs() if cache else contextlib.nullcontext():
            assert text_of(tiny_qwen3, drafter, **cache, **LAWS[distribution]) == plain
        rounds.append(drafter.stats.rows)
    assert rounds[0] == rounds[1]


def test_an_end_inside_a_branch_and_a_second_call(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3, draft_tree_size=MOST_NODES)
    plain = text_of(tiny_qwen3)
    with recorded_graphs(), tree_faults([plain], tiny_qwen3.config.vocab_size, MOST_NODES):
        for place in (17, 25, 35):
            ended = text_of(tiny_qwen3, eos_token_id=plain[place])
            assert text_of(tiny_qwen3, drafter, eos_token_id=plain[place], **STATIC) == ended


@pytest.mark.parametrize("draft_tree_size", [None, MOST_NODES], ids=["chain", "tree"])
def test_a_call_has_its_own_numbers(tiny_qwen3, draft_tree_size):
    """A penalty is part of what is captured; lengths and tokens are not, and a graph reads those of its call."""
    drafter = build_drafter(tiny_qwen3, draft_tree_size=draft_tree_size, draft_length="full")
    end, texts, captured = text_of(tiny_qwen3)[PROMPT.shape[1] + 3], [], [0]
    distributions = [{"repetition_penalty": penalty, "eos_token_id": 63} for penalty in (1.1, 1.6)]
    distributions += [
        {"min_new_tokens": least, "eos_token_id": token} for least, token in ((9, end), (30, end), (2, end + 1))
    ]
    with recorded_graphs() as made:
        for distribution in ({"max_new_tokens": 40} | distribution for distribution in distributions):
            texts.append(text_of(tiny_qwen3, **distribution))
            with oracle(tiny_qwen3, PROMPT, 0.8, torch.tensor([texts[-1]])):
                assert text_of(tiny_qwen3, drafter, **STATIC, **distribution) == texts[-1]
            captured.append(made[0].num_captured)
    assert len({tuple(text) for text in texts}) == len(distributions)
    # The rollout and acceptance of each penalty; other lengths of a text have the graphs of the first.
    assert [now - before for before, now in pairwise(captured[1:])] == [2, 2, 0, 0]
