"""The drafter's context travels with the target's cache: a second turn drafts what a fresh prefill would."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import oracle
from test_families import build
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hf_domino.decoding import drafting
from hf_domino.decoding.caches.conversation import kept_context
from hf_domino.decoding.runner import TargetRunner

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1}
PROMPT = torch.arange(5, 17)[None]
MORE = torch.arange(30, 37)[None]


@pytest.fixture(params=["domino", "medusa", "eagle3"])
def drafter(tiny_qwen3, make_drafter, request):
    """A drafter of each kind that keeps something of the text."""
    return make_drafter(tiny_qwen3, projector_type=request.param)


@pytest.fixture
def proposals(monkeypatch):
    """All tokens proposed, in order."""
    seen, propose = [], drafting.DraftSession.propose

    def record(self, *args, **kwargs):
        proposals = propose(self, *args, **kwargs)
        seen.append(proposals[0].tolist())
        return proposals

    monkeypatch.setattr(drafting.DraftSession, "propose", record)
    return seen


def first_turn(target, drafter, **options):
    arguments = OPTIONS | {"return_dict_in_generate": True} | options
    with oracle(target, PROMPT, 0.7, **OPTIONS):
        return target.generate(PROMPT, assistant_model=drafter, **arguments)


def second_turn(target, drafter, proposals, ids, cache):
    """Text and proposals of a turn on a cache, and of the same turn from nothing."""
    results = []
    for past in ({"past_key_values": cache}, {}):
        proposals.clear()
        text = target.generate(ids, assistant_model=drafter, **past, **OPTIONS)
        results.append((text.tolist(), list(proposals)))
    return results


def test_a_second_turn_drafts_at_once(tiny_qwen3, drafter, proposals):
    first = first_turn(tiny_qwen3, drafter)
    ids = torch.cat((first.sequences, MORE), dim=1)
    resumed, fresh = second_turn(tiny_qwen3, drafter, proposals, ids, first.past_key_values)
    assert resumed == fresh
    assert len(fresh[1]) > 5


def test_five_turns(tiny_qwen3, drafter, proposals):
    first = first_turn(tiny_qwen3, drafter)
    ids, cache = first.sequences, first.past_key_values
    for _ in range(4):
        ids = torch.cat((ids, MORE), dim=1)
        resumed, fresh = second_turn(tiny_qwen3, drafter, proposals, ids, cache)
        assert resumed == fresh
        ids = torch.tensor(resumed[0])


def test_a_cropped_cache(tiny_qwen3, drafter, proposals):
    """The last answer is taken back and asked for again."""
    first = first_turn(tiny_qwen3, drafter)
    cache = first.past_key_values
    cache.crop(-15)
    ids = torch.cat((first.sequences[:, : cache.get_seq_length()], MORE), dim=1)
    resumed, fresh = second_turn(tiny_qwen3, drafter, proposals, ids, cache)
    assert resumed == fresh


def test_a_copied_cache_serves_several_continuations(tiny_qwen3, drafter, proposals):
    first = first_turn(tiny_qwen3, drafter)
    for more in (MORE, MORE + 9):
        ids = torch.cat((first.sequences, more), dim=1)
        resumed, fresh = second_turn(tiny_qwen3, drafter, proposals, ids, copy.deepcopy(first.past_key_values))
        assert resumed == fresh


@pytest.mark.parametrize("how", ["plain turn between", "rewritten", "another drafter", "filled without"])
def test_an_unseen_prefix_costs_no_exactness(tiny_qwen3, tiny_drafter, make_drafter, proposals, how):
    drafter = None if how == "filled without" else tiny_drafter
    first = first_turn(tiny_qwen3, drafter)
    ids, cache = torch.cat((first.sequences, MORE), dim=1), first.past_key_values
    if how == "rewritten":
        cache.crop(-20)
        ids = torch.cat((first.sequences[:, : cache.get_seq_length()], MORE + 5), dim=1)
    if how in ("plain turn between", "rewritten"):
        ids = tiny_qwen3.generate(ids, past_key_values=cache, **OPTIONS)
        ids = torch.cat((ids, MORE), dim=1)
    drafter = make_drafter(tiny_qwen3, block_size=4) if how == "another drafter" else tiny_drafter
    context, has_gap = kept_context(copy.deepcopy(cache), drafter)
    assert (context is not None) == (how == "plain turn between")
    assert has_gap
    resumed, fresh = second_turn(tiny_qwen3, drafter, proposals, ids, cache)
    assert resumed[0] == fresh[0]
    assert resumed[1] != fresh[1]


@pytest.mark.parametrize("how", ["inference mode", "cast", "cropped into padding"])
def test_context_that_cannot_go_on_is_left(tiny_qwen3, make_drafter, how):
    drafter, prompt, mask = make_drafter(tiny_qwen3), PROMPT, torch.ones_like(PROMPT)
    if how == "cropped into padding":
        prompt = torch.nn.functional.pad(PROMPT, (8, 0), value=2)
        mask = torch.nn.functional.pad(mask, (8, 0))
    options = OPTIONS | {"attention_mask": mask, "assistant_model": drafter, "return_dict_in_generate": True}
    with torch.inference_mode(how == "inference mode"):
        first = tiny_qwen3.generate(prompt, **options)
    cache, sequences = first.past_key_values, first.sequences.clone()
    if how == "cast":
        drafter.to(torch.bfloat16)
    if how == "cropped into padding":
        cache.crop(-(cache.get_seq_length() - 6))
    mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - prompt.shape[1] + MORE.shape[1]), value=1)
    ids, again = torch.cat((sequences, MORE), dim=1), OPTIONS | {"attention_mask": mask}
    resumed = tiny_qwen3.generate(ids, past_key_values=cache, assistant_model=drafter, **again)
    assert torch.equal(resumed, tiny_qwen3.generate(ids, **again))


def test_a_reset_cache_serves_a_batch(tiny_qwen3, tiny_drafter):
    cache = first_turn(tiny_qwen3, tiny_drafter).past_key_values
    cache.reset()
    prompts = torch.cat((PROMPT, PROMPT + 20))
    batch = tiny_qwen3.generate(prompts, past_key_values=cache, assistant_model=tiny_drafter, **OPTIONS)
    assert torch.equal(batch, tiny_qwen3.generate(prompts, **OPTIONS))


def test_only_the_new_tokens_may_be_passed(tiny_qwen3, tiny_drafter):
    """As `generate` takes them: with a mask over all."""
    first = first_turn(tiny_qwen3, tiny_drafter)
    ids, cached = torch.cat((first.sequences, MORE), dim=1), first.past_key_values.get_seq_length()
    resumed = tiny_qwen3.generate(
        ids[:, cached:],
        attention_mask=torch.ones_like(ids),
        past_key_values=first.past_key_values,
        assistant_model=tiny_drafter,
        **OPTIONS,
    )
    fresh = tiny_qwen3.generate(ids, **OPTIONS)
    assert torch.equal(resumed[:, -OPTIONS["max_new_tokens"] :], fresh[:, -OPTIONS["max_new_tokens"] :])


class Breaking(BaseStreamer):
    """Fails in the middle of a call."""

    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count > 9:
            raise KeyboardInterrupt

    def end(self):
        pass


def test_a_call_that_breaks_off_leaves_a_good_cache(tiny_qwen3, tiny_drafter):
    plain = tiny_qwen3.generate(PROMPT, **OPTIONS)
    cache = DynamicCache(config=tiny_qwen3.config)
    with oracle(tiny_qwen3, PROMPT, 0.5, **OPTIONS), pytest.raises(KeyboardInterrupt):
        tiny_qwen3.generate(PROMPT, past_key_values=cache, streamer=Breaking(), assistant_model=tiny_drafter, **OPTIONS)
    ids = plain[:, : PROMPT.shape[1] + 9]  # what was streamed
    assert PROMPT.shape[1] <= cache.get_seq_length() < ids.shape[1]
    rest = OPTIONS | {"max_new_tokens": OPTIONS["max_new_tokens"] - 9}
    assert torch.equal(tiny_qwen3.generate(ids, past_key_values=cache, **rest), plain)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_call_without_rounds_leaves_sliding_windows_as_plain_does(make_drafter, family):
    target = build(family)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(PROMPT.repeat(1, 3), assistant_model=make_drafter(target), max_new_tokens=1, **options)
    alone = target.generate(PROMPT.repeat(1, 3), max_new_tokens=1, **options)
    for ours, plain in zip(first.past_key_values.layers, alone.past_key_values.layers, strict=True):
        assert ours.keys.shape == plain.keys.shape
    ids = torch.cat((first.sequences, MORE), dim=1)
    text = target.generate(ids, past_key_values=first.past_key_values, max_new_tokens=9, do_sample=False)
    assert torch.equal(text, target.generate(ids, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("layer", [1, 3])
def test_an_interrupt_inside_a_forward(tiny_qwen3, tiny_drafter, layer):
    plain, cache, calls = tiny_qwen3.generate(PROMPT, **OPTIONS), DynamicCache(config=tiny_qwen3.config), []

    def break_off(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt

    handle = tiny_qwen3.model.layers[layer].register_forward_pre_hook(break_off)
    try:
        with pytest.raises(KeyboardInterrupt):
            tiny_qwen3.generate(PROMPT, past_key_values=cache, assistant_model=tiny_drafter, **OPTIONS)
    finally:
        handle.remove()
    assert len({keys.keys.shape for keys in cache.layers}) == 1
    length = cache.get_seq_length()
    assert length >= PROMPT.shape[1]
    rest = OPTIONS | {"max_new_tokens": plain.shape[1] - length - 1}
    assert torch.equal(tiny_qwen3.generate(plain[:, : length + 1], past_key_values=cache, **rest), plain)


def test_a_cache_that_cannot_be_tidied_does_not_hide_what_went_wrong(tiny_qwen3, tiny_drafter, monkeypatch):
    def end(*args):
        raise RuntimeError("in the way")

    monkeypatch.setattr(TargetRunner, "end", end)
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="brought back .*in the way"):
        tiny_qwen3.generate(PROMPT, streamer=Breaking(), assistant_model=tiny_drafter, **OPTIONS)


def test_saved_caches_do_not_hold_the_drafter(tiny_qwen3, tiny_drafter, tmp_path):
    cache = first_turn(tiny_qwen3, tiny_drafter).past_key_values
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert loaded._hf_domino_context is None
