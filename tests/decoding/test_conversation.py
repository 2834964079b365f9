"""The drafter's context travels with the target's cache: a second turn drafts what a fresh prefill would."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from families import build as build_by_rule
from oracle import oracle, proposed
from test_families import build
from transformers import DynamicCache, cache_utils
from transformers.generation.streamers import BaseStreamer

from hf_domino._common.cache_name import CACHE

pytestmark = pytest.mark.transformers

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1}
PROMPT = torch.arange(5, 17)[None]
MORE = torch.arange(30, 37)[None]


@pytest.fixture(params=["domino", "eagle3"])
def drafter(tiny_qwen3, make_drafter, request):
    """A drafter of each kind that keeps something of the text."""
    return make_drafter(tiny_qwen3, projector_type=request.param)


def first_turn(target, drafter, **options):
    arguments = OPTIONS | {"return_dict_in_generate": True} | options
    with oracle(target, PROMPT, 0.7, **OPTIONS):
        return target.generate(PROMPT, assistant_model=drafter, **arguments)


def second_turn(target, drafter, ids, cache):
    """Text and proposals of a turn on a cache, and of the same turn from nothing."""
    results = []
    for past in ({CACHE: cache}, {}):
        with proposed() as rounds:
            text = target.generate(ids, assistant_model=drafter, **past, **OPTIONS)
        results.append((text.tolist(), [tokens for _, _, tokens in rounds]))
    return results


def test_later_turns_draft_at_once(tiny_qwen3, drafter):
    first = first_turn(tiny_qwen3, drafter)
    ids, cache = first.sequences, first[CACHE]
    for _ in range(2):
        ids = torch.cat((ids, MORE), dim=1)
        resumed, fresh = second_turn(tiny_qwen3, drafter, ids, cache)
        assert resumed == fresh
        assert len(fresh[1]) > 5
        ids = torch.tensor(resumed[0])


def test_copies_of_a_cropped_cache_serve_several_continuations(tiny_qwen3, drafter):
    """The last answer is taken back and asked for again, in other ways."""
    first = first_turn(tiny_qwen3, drafter)
    first[CACHE].crop(-15)
    for more in (MORE, MORE + 9):
        ids = torch.cat((first.sequences[:, : first[CACHE].get_seq_length()], more), dim=1)
        resumed, fresh = second_turn(tiny_qwen3, drafter, ids, copy.deepcopy(first[CACHE]))
        assert resumed == fresh


@pytest.mark.parametrize("how", ["plain turn between", "rewritten", "another drafter", "filled without"])
def test_an_unseen_prefix_costs_no_exactness(tiny_qwen3, tiny_drafter, make_drafter, how):
    drafter = None if how == "filled without" else tiny_drafter
    first = first_turn(tiny_qwen3, drafter)
    ids, cache = torch.cat((first.sequences, MORE), dim=1), first[CACHE]
    if how == "rewritten":
        cache.crop(-20)
        ids = torch.cat((first.sequences[:, : cache.get_seq_length()], MORE + 5), dim=1)
    if how in ("plain turn between", "rewritten"):
        ids = tiny_qwen3.generate(ids, past_key_values=cache, **OPTIONS)
        ids = torch.cat((ids, MORE), dim=1)
    drafter = make_drafter(tiny_qwen3, block_size=4) if how == "another drafter" else tiny_drafter
    resumed, fresh = second_turn(tiny_qwen3, drafter, ids, cache)
    assert resumed[0] == fresh[0]
    assert resumed[1] != fresh[1]


@pytest.mark.parametrize("how", ["inference mode", "cast", "cropped into padding"])
def test_context_that_cannot_go_on_is_left(tiny_qwen3, make_drafter, how):
    drafter, num_padded = make_drafter(tiny_qwen3), 8 if how == "cropped into padding" else 0
    prompt = torch.nn.functional.pad(PROMPT, (num_padded, 0), value=2)
    mask = torch.nn.functional.pad(torch.ones_like(PROMPT), (num_padded, 0))
    options = OPTIONS | {"attention_mask": mask, "assistant_model": drafter, "return_dict_in_generate": True}
    with torch.inference_mode(how == "inference mode"):
        first = tiny_qwen3.generate(prompt, **options)
    cache, sequences = first[CACHE], first.sequences.clone()
    if how == "cast":
        drafter.to(torch.bfloat16)
    if num_padded:
        cache.crop(-(cache.get_seq_length() - 6))
    mask = torch.nn.functional.pad(mask, (0, sequences.shape[1] - prompt.shape[1] + MORE.shape[1]), value=1)
    ids, again = torch.cat((sequences, MORE), dim=1), OPTIONS | {"attention_mask": mask}
    resumed = tiny_qwen3.generate(ids, past_key_values=cache, assistant_model=drafter, **again)
    assert torch.equal(resumed, tiny_qwen3.generate(ids, **again))


def test_a_reset_cache_serves_a_batch(tiny_qwen3, tiny_drafter):
    cache = first_turn(tiny_qwen3, tiny_drafter)[CACHE]
    cache.reset()
    prompts = torch.cat((PROMPT, PROMPT + 20))
    batch = tiny_qwen3.generate(prompts, past_key_values=cache, assistant_model=tiny_drafter, **OPTIONS)
    assert torch.equal(batch, tiny_qwen3.generate(prompts, **OPTIONS))


def test_only_the_new_tokens_may_be_passed(tiny_qwen3, tiny_drafter):
    """As `generate` takes them: with a mask over all."""
    first = first_turn(tiny_qwen3, tiny_drafter)
    ids, cached = torch.cat((first.sequences, MORE), dim=1), first[CACHE].get_seq_length()
    options = OPTIONS | {"attention_mask": torch.ones_like(ids), "assistant_model": tiny_drafter}
    resumed = tiny_qwen3.generate(ids[:, cached:], past_key_values=first[CACHE], **options)
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


def assert_goes_on(target, cache, plain):
    """What is in the cache is the text that was there, which plain generation finishes as it would have been."""
    assert len({layer.keys.shape for layer in cache.layers}) == 1
    length = cache.get_seq_length()
    assert PROMPT.shape[1] <= length < plain.shape[1] - 1
    rest = OPTIONS | {"max_new_tokens": plain.shape[1] - length - 1}
    assert torch.equal(target.generate(plain[:, : length + 1], past_key_values=cache, **rest), plain)


def test_a_call_that_breaks_off_leaves_a_good_cache(tiny_qwen3, tiny_drafter):
    plain, cache = tiny_qwen3.generate(PROMPT, **OPTIONS), DynamicCache(config=tiny_qwen3.config)
    with oracle(tiny_qwen3, PROMPT, 0.5, plain), pytest.raises(KeyboardInterrupt):
        tiny_qwen3.generate(PROMPT, past_key_values=cache, streamer=Breaking(), assistant_model=tiny_drafter, **OPTIONS)
    assert_goes_on(tiny_qwen3, cache, plain)


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
    assert_goes_on(tiny_qwen3, cache, plain)


PREFILLS = {
    "first": lambda target, drafter: (PROMPT, DynamicCache(config=target.config), {}),
    "later": lambda target, drafter: second_prompt(target, drafter),
    "later, in chunks": lambda target, drafter: (*second_prompt(target, drafter)[:2], {"prefill_chunk_size": 3}),
}


def second_prompt(target, drafter):
    """Ids and cache of a second turn, and no further options."""
    options = OPTIONS | {"max_new_tokens": 9, "return_dict_in_generate": True}
    first = target.generate(PROMPT, assistant_model=drafter, **options)
    return torch.cat((first.sequences, MORE), dim=1), first[CACHE], {}


def model_of(family):
    return build_by_rule(family) if "_" in family or family == "lfm2" else build(family)


INTERRUPTED = [*itertools.product(("Qwen2", "Mistral", "Gemma3", "qwen3_5_text", "falcon_h1", "lfm2"), PREFILLS)]
# Every way with one family, and each other family in one way.
QUICK = [*INTERRUPTED[:3], *INTERRUPTED[4::4], ("qwen3_5_text", "later, in chunks")]


@pytest.mark.parametrize(
    ("family", "prefill"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in INTERRUPTED],
)
def test_a_conversation_goes_on_after_an_interrupt_in_a_prefill(make_drafter, family, prefill):
    target = model_of(family)
    drafter = make_drafter(target)
    ids, cache, options = PREFILLS[prefill](target, drafter)
    length, calls = cache.get_seq_length(), []
    # Falcon-H1 itself says something else on a cache than without one.
    plain = target.generate(ids, past_key_values=copy.deepcopy(cache), **OPTIONS)

    def break_off(*args):
        calls.append(1)
        if len(calls) == 1 + ("prefill_chunk_size" in options):
            raise KeyboardInterrupt

    handle = target.get_decoder().layers[2].register_forward_pre_hook(break_off)
    try:
        with pytest.raises(KeyboardInterrupt):
            target.generate(ids, past_key_values=cache, assistant_model=drafter, **options, **OPTIONS)
    finally:
        handle.remove()
    assert cache.get_seq_length() == length + options.get("prefill_chunk_size", 0)  # a chunk is kept
    resumed = target.generate(ids, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    assert torch.equal(resumed, plain)


@pytest.mark.parametrize("family", ["Qwen2", "Gemma3"])
@pytest.mark.parametrize("nth", [1, 2, 25, 26])
def test_a_conversation_goes_on_where_memory_ran_out_inside_a_layers_cache(make_drafter, monkeypatch, family, nth):
    """Keys had been stored, and values had not: in the prefill of a second turn or in one of its rounds."""
    target = build(family)
    drafter = make_drafter(target)
    ids, cache, _ = second_prompt(target, drafter)
    plain, count = target.generate(ids, **OPTIONS), itertools.count(1)

    class Full:
        """The module `torch` as the cache knows it, on a machine whose memory is full."""

        def __getattr__(self, name):
            return getattr(torch, name)

        def cat(self, *args, **kwargs):
            if next(count) == nth:
                raise torch.OutOfMemoryError("out of memory")
            return torch.cat(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cache_utils, "torch", Full())
        with pytest.raises(torch.OutOfMemoryError):
            target.generate(ids, past_key_values=cache, assistant_model=drafter, **OPTIONS)
    length = cache.get_seq_length()
    rest = OPTIONS | {"max_new_tokens": plain.shape[1] - max(length + 1, ids.shape[1])}
    start = plain[:, : max(length + 1, ids.shape[1])]
    assert torch.equal(target.generate(start, past_key_values=cache, assistant_model=drafter, **rest), plain)


def test_a_cache_that_cannot_be_tidied_does_not_hide_what_went_wrong(tiny_qwen3, tiny_drafter):
    class Wrecking(Breaking):
        def put(self, value):
            if self.count == 9:
                cache.layers = None
            super().put(value)

    cache = DynamicCache(config=tiny_qwen3.config)
    options = OPTIONS | {"streamer": Wrecking(), "assistant_model": tiny_drafter}
    with pytest.raises(KeyboardInterrupt), pytest.warns(UserWarning, match="could not be restored"):
        tiny_qwen3.generate(PROMPT, past_key_values=cache, **options)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_call_without_rounds_leaves_sliding_windows_as_plain_does(make_drafter, family):
    target = build(family)
    options = {"do_sample": False, "return_dict_in_generate": True}
    first = target.generate(PROMPT.repeat(1, 3), assistant_model=make_drafter(target), max_new_tokens=1, **options)
    alone = target.generate(PROMPT.repeat(1, 3), max_new_tokens=1, **options)
    for ours, plain in zip(first[CACHE].layers, alone[CACHE].layers, strict=True):
        assert ours.keys.shape == plain.keys.shape
    ids = torch.cat((first.sequences, MORE), dim=1)
    text = target.generate(ids, past_key_values=first[CACHE], max_new_tokens=9, do_sample=False)
    assert torch.equal(text, target.generate(ids, max_new_tokens=9, do_sample=False))


def test_a_context_is_only_kept_on_a_cache_that_the_caller_has(tiny_qwen3, tiny_drafter, monkeypatch):
    kept = []
    monkeypatch.setattr("hf_domino.decoding.loop.keep_context", lambda *args: kept.append(args[0]))
    options = OPTIONS | {"max_new_tokens": 4, "assistant_model": tiny_drafter}
    tiny_qwen3.generate(PROMPT, **options)
    assert not kept
    cache = DynamicCache(config=tiny_qwen3.config)
    tiny_qwen3.generate(PROMPT, **options, **{CACHE: cache})
    returned = tiny_qwen3.generate(PROMPT, **options, return_dict_in_generate=True)[CACHE]
    assert [id(each) for each in kept] == [id(cache), id(returned)]


def test_saved_caches_do_not_hold_the_drafter(tiny_qwen3, tiny_drafter, tmp_path):
    cache = first_turn(tiny_qwen3, tiny_drafter)[CACHE]
    torch.save(cache, tmp_path / "cache.pt")
    weights = sum(weight.nbytes for weight in tiny_drafter.parameters())
    states = sum(2 * layer.keys.nbytes for layer in cache.layers)
    assert (tmp_path / "cache.pt").stat().st_size < 2 * states + weights / 2
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert loaded.get_seq_length() == cache.get_seq_length()
