"""Targets with recurrent layers: their states are put back after a rejection, and the text is the target's own."""

from __future__ import annotations

import pytest
import torch
from families import build
from oracle import oracle
from test_families import check_step_outputs
from transformers import DynamicCache

import hf_domino
from hf_domino.decoding.caches import GrowingCache

pytestmark = pytest.mark.transformers

PROMPT = torch.arange(7, 27)[None]
OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1}
HYBRIDS = "qwen3_5_text", "qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2", "zaya", "inkling_text"


@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_is_lossless(family, make_drafter):
    target = build(family)
    drafter = make_drafter(target)
    plain = target.generate(PROMPT, **OPTIONS)
    with oracle(target, PROMPT, 0.7, plain):
        assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **OPTIONS), plain)
    assert drafter.stats.acceptance_length > 1.5
    # Copies, which are longer than a block.
    again = torch.cat((plain, plain[:, :30]), dim=1)
    options = OPTIONS | {"assistant_model": drafter, "prompt_lookup_num_tokens": 12}
    assert torch.equal(target.generate(again, **options), target.generate(again, **OPTIONS))
    assert drafter.stats.num_lookups


@pytest.mark.parametrize("family", HYBRIDS)
def test_hidden_states_and_attentions(family, make_drafter):
    """Layers without attention have none; `generate` returns those of the others."""
    target = build(family)
    check_step_outputs(target, make_drafter(target))


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_cache_can_be_gone_on_with(family, make_drafter):
    target = build(family)
    options = OPTIONS | {"max_new_tokens": 36}
    whole = target.generate(PROMPT, **options)
    with oracle(target, PROMPT, 0.6, whole):
        first = target.generate(
            PROMPT,
            assistant_model=make_drafter(target),
            return_dict_in_generate=True,
            **(OPTIONS | {"max_new_tokens": 21}),
        )
    rest = target.generate(first.sequences, past_key_values=first.past_key_values, **OPTIONS | {"max_new_tokens": 15})
    assert torch.equal(rest, whole)


@pytest.mark.parametrize("length", [2, 20])
def test_convolutions_beside_a_window_keep_no_more_than_they_read(length, make_drafter):
    target = build("inkling_text")
    prompt, options = PROMPT[:, :length], OPTIONS | {"return_dict_in_generate": True}
    plain = target.generate(prompt, **options)
    with oracle(target, prompt, 0.7, plain.sequences):
        drafted = target.generate(prompt, assistant_model=make_drafter(target), **options)
    for layer, other in zip(drafted.past_key_values.layers, plain.past_key_values.layers, strict=True):
        for states, expected in zip(layer.conv_states.values(), other.conv_states.values(), strict=True):
            assert torch.allclose(states, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "zaya"])
@pytest.mark.parametrize("layer", [1, 3])
def test_an_interrupt_while_committed_tokens_run_once_more(family, layer, make_drafter, monkeypatch):
    target, cache = build(family), DynamicCache(config=build(family).config)
    plain, keep = target.generate(PROMPT, **OPTIONS), GrowingCache.keep

    def break_off(*_):
        raise KeyboardInterrupt

    def keep_and_break_off(self, *arguments):
        handle = target.model.layers[layer].register_forward_hook(break_off)
        try:
            keep(self, *arguments)
        finally:
            handle.remove()

    monkeypatch.setattr(GrowingCache, "keep", keep_and_break_off)
    with oracle(target, PROMPT, 0.8, plain), pytest.raises(KeyboardInterrupt):
        target.generate(PROMPT, past_key_values=cache, assistant_model=make_drafter(target), **OPTIONS)
    length = cache.get_seq_length()
    assert length >= PROMPT.shape[1]
    rest = OPTIONS | {"max_new_tokens": plain.shape[1] - length - 1}
    assert torch.equal(target.generate(plain[:, : length + 1], past_key_values=cache, **rest), plain)


def test_batches_are_refused(make_drafter):
    target = build("qwen3_5_text")
    with pytest.raises(
        ValueError, match=r"cache must be made of dynamic attention layers.*LinearAttentionLayer.*one at"
    ):
        target.generate(PROMPT.repeat(2, 1), assistant_model=make_drafter(target), max_new_tokens=4)


def test_batches_with_a_default_drafter_run_plain(make_drafter):
    """The loop refuses them before it uses the cache, which the target then fills."""
    target = build("qwen3_5_text")
    plain = target.generate(PROMPT.repeat(2, 1), **OPTIONS)
    hf_domino.attach(target, make_drafter(target))
    assert torch.equal(target.generate(PROMPT.repeat(2, 1), **OPTIONS), plain)
    assert hf_domino.attached(target).num_plain == {"the target's cache": 1}
