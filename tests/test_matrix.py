"""Every family of targets under every feature of `generate`: assisted output equals plain output, in fp32."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from builders import left_padded
from oracle import faults, oracle
from test_families import FAMILIES, build

NEW_TOKENS = 20
# Sliding windows, experts, soft caps; the others are run by hand.
IN_CI = (("Gemma3", "domino"), ("GptOss", "domino"), ("Mistral", "domino"), ("Gemma3", "eagle3"))
PROMPTS = [torch.arange(7, 27), torch.arange(40, 45), torch.tensor([9]), torch.arange(60, 90)]


def prompt_of(batch_size):
    ids, mask = left_padded([PROMPTS[index % len(PROMPTS)] for index in range(batch_size)])
    return {"input_ids": ids, "attention_mask": mask}


target_of = functools.cache(build)


@functools.cache
def text_of(target, batch_size):
    """The plain greedy text of the prompts, which several features start from."""
    return target.generate(**prompt_of(batch_size), do_sample=False, max_new_tokens=NEW_TOKENS)


def compare(target, drafter, batch_size, truth=None, **options):
    """Plain and assisted output must be equal, where drafts of all lengths are accepted."""
    prompt, options = prompt_of(batch_size), {"do_sample": False, "max_new_tokens": NEW_TOKENS} | options
    plain = target.generate(**prompt, **options)
    with oracle(target, prompt["input_ids"], 0.7, plain if truth is None else truth):
        assert torch.equal(target.generate(**prompt, assistant_model=drafter, **options), plain)


def greedy(target, drafter, batch_size, tokenizer):
    compare(target, drafter, batch_size)


def end_of_text(target, drafter, batch_size, tokenizer):
    text = text_of(target, batch_size)
    eos = int(text[0, 11 - NEW_TOKENS])
    compare(target, drafter, batch_size, text, eos_token_id=eos)


def processors(target, drafter, batch_size, tokenizer):
    compare(target, drafter, batch_size, repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=9)


def stop_strings(target, drafter, batch_size, tokenizer):
    text = text_of(target, batch_size)
    stop = tokenizer.decode(text[0, -9:-7] % len(tokenizer))
    compare(target, drafter, batch_size, text, stop_strings=[stop], tokenizer=tokenizer, eos_token_id=5)


def conversation(target, drafter, batch_size, tokenizer):
    if batch_size > 1:
        pytest.skip("a cache is gone on with one sequence at a time")
    prompt, options = {"input_ids": PROMPTS[0][None]}, {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    first = target.generate(**prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    alone = target.generate(**prompt, return_dict_in_generate=True, **options)
    ids = torch.cat((first.sequences, PROMPTS[1][None]), dim=1)
    # Not from a fresh prefill: it rounds otherwise, which can send a token to another expert.
    plain = target.generate(ids, past_key_values=alone.past_key_values, **options)
    with oracle(target, ids, 0.6, plain):
        second = target.generate(ids, past_key_values=first.past_key_values, assistant_model=drafter, **options)
    assert torch.equal(second, plain)


def sampled(target, drafter, batch_size, tokenizer):
    """The same seed writes the same text, where drafts of every length are accepted."""
    prompt, options = prompt_of(batch_size), {"do_sample": True, "temperature": 1.2, "max_new_tokens": NEW_TOKENS}
    torch.manual_seed(0)
    plain = target.generate(**prompt, **options)
    with faults(plain.tolist(), target.config.get_text_config(decoder=True).vocab_size):
        torch.manual_seed(0)
        assert torch.equal(target.generate(**prompt, assistant_model=drafter, **options), plain)


FEATURES = [greedy, end_of_text, processors, stop_strings, conversation, sampled]
KINDS = "domino", "eagle3", "recycling"


def cases():
    """Every case; CI has each feature of each of its pairs, alone or in a batch in turn."""
    families = [family for family in FAMILIES if family != "GPT2"]
    for family, kind, (index, feature) in itertools.product(families, KINDS, enumerate(FEATURES)):
        for batch_size in (1, 4):
            place = IN_CI.index((family, kind)) + index if (family, kind) in IN_CI else None
            is_turn = place is not None and (batch_size > 1) == (place % 2 == 1 and feature is not conversation)
            yield pytest.param(family, kind, feature, batch_size, marks=() if is_turn else pytest.mark.slow)


@pytest.mark.parametrize(("family", "kind", "feature", "batch_size"), [*cases()])
def test_lossless(family, kind, feature, batch_size, make_drafter, tiny_tokenizer):
    target = target_of(family)
    feature(target, make_drafter(target, projector_type=kind), batch_size, tiny_tokenizer)
