"""A caller's own function is never asked about a text that it has forbidden, whatever is proposed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from builders import PAD

import hf_domino

PROMPT = torch.arange(7, 19)[None]
OPTIONS = {"max_new_tokens": 24, "pad_token_id": PAD, "eos_token_id": -1}


class Trie:
    """Every token may be followed by three others; a text that goes another way is not known."""

    def __init__(self):
        self.texts = 0

    def followers(self, token):
        return [(7 * token + step) % 60 + 4 for step in (1, 3, 9)]

    def __call__(self, prompt, ids):
        self.texts += 1
        new = ids[PROMPT.shape[1] - 1 :].tolist()
        for before, token in pairwise(new):
            if token not in self.followers(before):
                raise KeyError(token)
        return self.followers(new[-1])


@pytest.fixture(params=["recycling", "domino", "a draft vocabulary", "lookup", "trees"])
def proposer(request, tiny_qwen3, make_drafter):
    """A drafter and options of the call."""
    if request.param == "recycling":
        return hf_domino.recycling(tiny_qwen3), {}
    drafter = make_drafter(tiny_qwen3)
    if request.param == "a draft vocabulary":
        return drafter.restricted(range(0, 64, 4)), {}
    if request.param == "trees":
        return make_drafter(tiny_qwen3, draft_tree_size=12), {}
    return drafter, {"prompt_lookup_num_tokens": 5} if request.param == "lookup" else {}


@pytest.mark.parametrize("do_sample", [False, True])
def test_it_is_not_asked_behind_what_it_forbids(tiny_qwen3, proposer, do_sample):
    drafter, options = proposer
    texts = []
    for extra in ({}, options | {"assistant_model": drafter}):
        torch.manual_seed(2)
        text = tiny_qwen3.generate(PROMPT, prefix_allowed_tokens_fn=Trie(), do_sample=do_sample, **OPTIONS, **extra)
        texts.append(text.tolist())
    assert texts[0] == texts[1]


def test_it_is_asked_once_about_each_text(tiny_qwen3, make_drafter):
    seen = []

    def allowed(prompt, ids):
        seen.append(tuple(ids.tolist()))
        return list(range(4, 60))

    tiny_qwen3.generate(
        PROMPT, prefix_allowed_tokens_fn=allowed, do_sample=False, assistant_model=make_drafter(tiny_qwen3), **OPTIONS
    )
    assert len(seen) == len(set(seen))
