"""A caller's own function decides nothing about texts that plain generation never writes, whatever is proposed."""

from __future__ import annotations

import weakref
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


@pytest.mark.parametrize("answer", [[], torch.empty(3, dtype=torch.long)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_it_may_refill_one_object_and_return_it_again(tiny_qwen3, proposer, do_sample, answer):
    trie = Trie()

    def allowed(prompt, ids):
        followers = trie(prompt, ids)
        if isinstance(answer, list):
            answer[:] = followers
        else:
            answer.copy_(torch.tensor(followers))
        return answer

    drafter, options = proposer
    call = OPTIONS | {"do_sample": do_sample, "prefix_allowed_tokens_fn": allowed}
    torch.manual_seed(2)
    plain = tiny_qwen3.generate(PROMPT, **call)
    torch.manual_seed(2)
    assert torch.equal(tiny_qwen3.generate(PROMPT, assistant_model=drafter, **call, **options), plain)


def unanswered(kind):
    """What a function does behind a text that it was never made for."""
    if kind == "raises":
        raise KeyError("no such text")
    return []


@pytest.mark.parametrize(
    ("do_sample", "num_sequences", "kind"),
    [(False, 1, "raises"), (True, 1, "is empty"), (True, 2, "raises")],
)
def test_it_need_not_have_an_answer_behind_texts_that_are_not_written(
    tiny_qwen3, proposer, do_sample, num_sequences, kind
):
    drafter, options = proposer
    prompts = torch.cat((PROMPT, PROMPT + 20))[:num_sequences]
    torch.manual_seed(2)
    plain = tiny_qwen3.generate(prompts, do_sample=do_sample, **OPTIONS)

    def allowed(prompt, ids):
        is_written = torch.equal(ids, plain[prompt, : len(ids)])
        return torch.arange(64) if is_written else unanswered(kind)

    options = options | OPTIONS | {"do_sample": do_sample, "prefix_allowed_tokens_fn": allowed}
    torch.manual_seed(2)
    assert torch.equal(tiny_qwen3.generate(prompts, assistant_model=drafter, **options), plain)


def test_it_need_not_have_an_answer_behind_a_stop_of_the_caller(tiny_qwen3, proposer):
    drafter, options = proposer
    end = PROMPT.shape[1] + 9

    def allowed(prompt, ids):
        return list(range(64)) if len(ids) < end else unanswered("raises")

    def stops(ids, scores):
        return torch.full((len(ids),), ids.shape[1] >= end)

    call = OPTIONS | {"do_sample": False, "prefix_allowed_tokens_fn": allowed, "stopping_criteria": [stops]}
    plain = tiny_qwen3.generate(PROMPT, **call)
    assert plain.shape[1] == end
    assert torch.equal(tiny_qwen3.generate(PROMPT, assistant_model=drafter, **call, **options), plain)


def test_it_raises_where_it_raises_in_plain_generation(tiny_qwen3, proposer):
    drafter, options = proposer

    def allowed(prompt, ids):
        if len(ids) == PROMPT.shape[1] + 9:
            raise KeyError("nine")
        return [4 + len(ids)]  # so what is drafted is always accepted

    call = OPTIONS | options | {"do_sample": False, "prefix_allowed_tokens_fn": allowed}
    with pytest.raises(KeyError, match="nine"):
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **call)


def test_what_it_answered_is_not_kept_for_the_whole_text(tiny_qwen3, make_drafter):
    """An answer may be as long as the vocabulary."""
    answers, most = weakref.WeakSet(), 0

    class Answer(list):
        __hash__ = object.__hash__

    def allowed(prompt, ids):
        nonlocal most
        answer = Answer(range(4, 60))
        answers.add(answer)
        most = max(most, len(answers))
        return answer

    call = OPTIONS | {"max_new_tokens": 200, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    tiny_qwen3.generate(PROMPT, assistant_model=make_drafter(tiny_qwen3), **call)
    assert 0 < most <= 130


def test_it_is_asked_once_about_each_text(tiny_qwen3, make_drafter):
    seen = []

    def allowed(prompt, ids):
        seen.append(tuple(ids.tolist()))
        return list(range(4, 60))

    tiny_qwen3.generate(
        PROMPT, prefix_allowed_tokens_fn=allowed, do_sample=False, assistant_model=make_drafter(tiny_qwen3), **OPTIONS
    )
    assert len(seen) == len(set(seen))
