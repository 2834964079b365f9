"""Batches in fixed shape give what plain generation gives, launched one by one and played from recordings alike."""

from __future__ import annotations

import contextlib
import itertools
from inspect import signature

import families
import pytest
import torch
from builders import left_padded
from oracle import faults, tree_faults
from recorded_graphs import recorded_graphs
from test_families import FAMILIES, PROMPT, build
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_chunked_causal_mask

import hf_domino
from hf_domino._common.cache_name import CACHE
from hf_domino.decoding import support
from hf_domino.decoding.static.batch_masks import batch_masks
from hf_domino.decoding.static.fixed_cache import FixedCache

STATIC = {"cache_implementation": "static"}
GREEDY = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.8, "top_k": 20}
PROMPTS = [PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12], PROMPT[0, :7].flip(0), PROMPT[0, 2:4]]
QUICK = "Mistral", "Gemma3", "GPT2"  # windows, two kinds of masks, learned positions


@pytest.fixture
def recorded():
    with recorded_graphs() as made:
        yield made
    hf_domino.release_workspaces()


@pytest.fixture(scope="module")
def target():
    return build("Mistral")


def both(target, drafter, count, seed=3, **options):
    """Texts of a batch, of plain generation and in fixed shape."""
    ids, mask = left_padded(PROMPTS[:count])
    found = []
    for extra in ({}, STATIC | {"assistant_model": drafter}):
        torch.manual_seed(seed)
        found.append(target.generate(ids, attention_mask=mask, **options, **extra).tolist())
    return found


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]
)
def test_every_family_writes_plain_text(family, make_drafter, recorded):
    target = build(family)
    ids, mask = left_padded(PROMPTS[:3])
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    with faults(plain.tolist(), target.config.get_text_config().vocab_size):  # all acceptance lengths occur
        text = target.generate(ids, attention_mask=mask, assistant_model=make_drafter(target), **GREEDY, **STATIC)
    assert text.tolist() == plain.tolist()


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        SAMPLED,
        SAMPLED | {"repetition_penalty": 1.3, "min_new_tokens": 4},
        GREEDY | {"no_repeat_ngram_size": 3, "prompt_lookup_num_tokens": 4},
    ],
    ids=["greedy", "sampled", "penalty", "n-grams and lookup"],
)
def test_sequences_of_any_length_end_one_by_one(target, make_drafter, recorded, count, options):
    plain = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    first, _ = both(target, None, count, **plain)[0], None
    ends = [first[0][25], first[1][22]]
    drafter = make_drafter(target)
    ids, mask = left_padded(PROMPTS[:count])
    texts = []
    for extra in (plain, options | STATIC | {"assistant_model": drafter}):
        torch.manual_seed(3)
        texts.append(target.generate(ids, attention_mask=mask, **(extra | {"eos_token_id": ends})).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("method", ["domino", "dflash", "dspark", "dflash2"])
def test_drafts_are_those_of_growing_batches(target, make_drafter, recorded, method):
    drafter = make_drafter(target, projector_type=method)
    ids, mask = left_padded(PROMPTS[:3])
    lengths = []
    for cache in ({}, STATIC):
        target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY, **cache)
        lengths.append(drafter.stats.acceptance_lengths)
    assert lengths[0] == lengths[1]
    if method == "domino":
        assert max(max(row) for row in lengths[0]) > 1


def test_trees_of_a_batch(target, make_drafter, recorded):
    drafter = make_drafter(target, draft_tree_size=12)
    ids, mask = left_padded(PROMPTS[:3])
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    with tree_faults(plain.tolist(), target.config.vocab_size, 12):
        text = target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY, **STATIC)
    assert text.tolist() == plain.tolist()
    assert drafter.stats.tree_size == 12
    assert max(max(row) for row in drafter.stats.rows) > 2


def test_few_stages_are_captured_and_later_calls_capture_none(target, make_drafter, recorded):
    drafter = make_drafter(target)
    for count, num_captured in ((5, None), (5, None), (3, None), (2, None), (1, None)):
        plain, text = both(target, drafter, count, eos_token_id=11, **GREEDY)
        assert text == plain
        assert len(recorded) == 1  # one set of buffers for batches of all sizes
        found = recorded[0].num_captured
        assert num_captured is None or found == num_captured
    assert recorded[0].num_captured <= 20  # four stages of 1, 2, 4 and 8 sequences, and the context alone


def test_scores_of_a_batch(target, make_drafter, recorded):
    options = GREEDY | {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    ids, mask = left_padded(PROMPTS[:3])
    plain = target.generate(ids, attention_mask=mask, **options)
    found = target.generate(ids, attention_mask=mask, assistant_model=make_drafter(target), **options, **STATIC)
    assert found.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(found[name]), torch.stack(plain[name]), atol=1e-4, rtol=1e-4)


def test_embeddings_as_prompts(target, make_drafter, recorded):
    ids, mask = left_padded(PROMPTS[:3])
    embeds = target.get_input_embeddings()(ids)
    plain = target.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY)
    options = GREEDY | STATIC | {"assistant_model": make_drafter(target)}
    assert target.generate(inputs_embeds=embeds, attention_mask=mask, **options).tolist() == plain.tolist()


# Layers that see everything before them, a window or a chunk of it, and targets that have two kinds of layers.
MASKED = {
    "llama": {"full_attention": lambda slot, place: slot <= place},
    "mistral": {"sliding_attention": lambda slot, place: place - families.WINDOW < slot <= place},
    "gemma3_text": {
        "full_attention": lambda slot, place: slot <= place,
        "sliding_attention": lambda slot, place: place - families.WINDOW < slot <= place,
    },
    "llama4_text": {
        "full_attention": lambda slot, place: slot <= place,
        "chunked_attention": lambda slot, place: slot <= place and slot // families.WINDOW == place // families.WINDOW,
    },
}
SHAPES = [(1, 1, 64), (2, 1, 64), (64, 1, 64), (16, 4, 64), (4, 16, 64), (8, 8, 64), (8, 8, 128), (3, 5, 15), (1, 8, 8)]
SHAPES += [(16, 1, 16), (4, 4, 16), (1, 1, 8), (1, 16, 16), (2, 8, 16), (5, 3, 16), (1, 2, 2), (2, 1, 2), (2, 2, 4)]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", MASKED)
def test_no_query_of_a_batch_sees_an_empty_slot(family, attention):
    """Transformers leaves out the mask of one query, and of as many queries as slots: here those of a whole batch."""
    if family == "llama4_text" and "block_sequence_ids" not in signature(create_chunked_causal_mask).parameters:
        pytest.skip("this version of Transformers cannot make the masks of chunks")
    target = families.build(family)
    target.set_attn_implementation(attention)
    like = StaticCache(config=target.config, max_cache_len=1)
    for count, width, capacity in SHAPES:
        cache = FixedCache(like, capacity, torch.device("cpu"), count)
        cache.is_batch = True
        lengths = torch.arange(count)[:, None] % (capacity - width + 1)
        masks = batch_masks(target, cache, lengths, width)
        if not isinstance(masks, dict):
            masks = {next(iter(MASKED[family])): masks}
        assert set(masks) == set(MASKED[family])
        for kind, sees in MASKED[family].items():
            rows = [
                [[sees(slot, start + offset) for slot in range(capacity)] for offset in range(width)]
                for start in lengths[:, 0].tolist()
            ]
            found = masks[kind] if masks[kind].dtype == torch.bool else masks[kind] == 0
            assert found[:, 0].tolist() == rows, (kind, count, width, capacity)


SIZED = itertools.product(
    ("llama", "gemma3_text", "gpt2", "gemma4_text", "qwen3", "mistral"),
    ("one token", "equal", "unequal", "returned several times"),
    ("greedy", "sampled"),
)
QUICK = [("gemma3_text", "equal", "sampled"), ("gemma3_text", "unequal", "greedy")]


@pytest.mark.parametrize(
    ("family", "prompts", "how"),
    [pytest.param(*case, marks=() if case[0] == "llama" or case in QUICK else pytest.mark.slow) for case in SIZED],
)
def test_batches_of_every_size_write_plain_text(family, prompts, how, make_drafter):
    """The sizes are those at which the positions of all blocks together are as many as the slots of the cache, 64."""
    target = families.build(family)
    options = SAMPLED if how == "sampled" else GREEDY
    for count, width in ((16, 4), (4, 16), (32, 2), (3, 6)):
        drafter = make_drafter(target, block_size=max(width - 1, 2))
        ids = torch.arange(4, 4 + 5 * count).view(count, 5) * 7 % 90 + 4
        mask = torch.ones_like(ids)
        kwargs = options | {"max_new_tokens": 10}
        if prompts == "one token":
            ids, mask = ids[:, :1], mask[:, :1]
        elif prompts == "unequal":
            mask = (torch.arange(5) >= torch.arange(count)[:, None] % 5).long()
        elif prompts == "returned several times":
            ids, mask = ids[: count // 2], mask[: count // 2]
            kwargs = SAMPLED | {"max_new_tokens": 10, "num_return_sequences": 2}
        texts = []
        for extra in ({}, STATIC | {"assistant_model": drafter, "num_assistant_tokens": width - 1}):
            torch.manual_seed(5)
            texts.append(target.generate(ids, attention_mask=mask, **kwargs, **extra).tolist())
        assert texts[0] == texts[1], (count, width)


@pytest.mark.parametrize("given", ["token", "embedding"])
def test_prompts_of_one_token_or_embedding(target, make_drafter, recorded, given):
    target = families.build("llama")
    ids = torch.tensor([[5], [9], [33]])
    prompt = {"input_ids": ids} if given == "token" else {"inputs_embeds": target.get_input_embeddings()(ids)}
    drafter = make_drafter(target)
    for count in (3, 1):
        part = {name: values[:count] for name, values in prompt.items()}
        plain = target.generate(**part, **GREEDY)
        with faults(plain.tolist(), target.config.vocab_size) if given == "token" else contextlib.nullcontext():
            text = target.generate(**part, assistant_model=drafter, **GREEDY, **STATIC)
        assert text.tolist() == plain.tolist()


def test_a_target_that_does_not_tell_sequences_apart_is_refused_by_name(make_drafter):
    """Bloom counts positions by a mask of its own, of which the first sequence's length would serve all."""
    target = families.build("bloom")
    ids, mask = left_padded(PROMPTS[:3])
    with pytest.raises(ValueError, match="batch size with cache_implementation='static' must be 1, got 3"):
        target.generate(ids, attention_mask=mask, assistant_model=make_drafter(target), **GREEDY, **STATIC)


def test_a_batch_in_fixed_shape_leaves_an_empty_cache(target, make_drafter, recorded):
    ids, mask = left_padded(PROMPTS[:3])
    options = GREEDY | STATIC | {"assistant_model": make_drafter(target), "return_dict_in_generate": True}
    found = target.generate(ids, attention_mask=mask, **options)
    assert found.sequences.shape == (3, ids.shape[1] + 20)
    assert type(found[CACHE]) is DynamicCache
    assert found[CACHE].get_seq_length() == 0


def test_sequences_that_have_ended_take_no_positions_that_the_target_lacks(make_drafter, recorded):
    """A batch of three fills a bucket of four: the fourth, which has ended, stood near the last learned position."""
    target = build("GPT2")
    prompts = [torch.arange(5, 5 + length) % 90 for length in (20, 30, 25, 126)]
    ids, mask = left_padded(prompts)
    options = {"do_sample": False, "max_length": 128, "pad_token_id": 0, "attention_mask": mask}
    plain = target.generate(ids, **options)
    options["eos_token_id"] = int(plain[3, 126])
    drafter = make_drafter(target)
    text = target.generate(ids, assistant_model=drafter, **options, **STATIC)
    assert text.tolist() == target.generate(ids, **options).tolist()


@pytest.mark.parametrize("pad", ["right", "inside", "all"])
def test_a_batch_that_is_not_padded_on_the_left_grows(target, make_drafter, monkeypatch, pad):
    monkeypatch.setattr(support, "uses_static_by_default", lambda input_ids: True)
    ids, mask = left_padded(PROMPTS[:3])
    where = {"right": slice(-4, None), "inside": slice(-8, -5), "all": slice(None)}[pad]
    mask[1, where] = 0
    drafter = make_drafter(target)
    options = GREEDY | {"attention_mask": mask}
    plain = target.generate(ids, **options)
    assert target.generate(ids, assistant_model=drafter, **options).tolist() == plain.tolist()
    assert "zeros on the left" in drafter.stats.why_growing
    with pytest.raises(ValueError, match="attention_mask of a batch with cache_implementation='static'"):
        target.generate(ids, assistant_model=drafter, **options, **STATIC)


def test_masks_of_any_dtype(target, make_drafter, recorded):
    ids, mask = left_padded(PROMPTS[:3])
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    options = GREEDY | STATIC | {"assistant_model": make_drafter(target)}
    for dtype in (torch.float32, torch.bool):
        assert target.generate(ids, attention_mask=mask.to(dtype), **options).tolist() == plain.tolist()


def test_a_device_that_prefers_it_runs_in_fixed_shape_by_default(target, make_drafter, monkeypatch, recorded):
    """As on a GPU. What a call cannot have in fixed shape grows, and the statistics say why."""
    monkeypatch.setattr(support, "uses_static_by_default", lambda input_ids: True)
    drafter, ids = make_drafter(target), PROMPT
    plain = target.generate(ids, **GREEDY)
    assert target.generate(ids, assistant_model=drafter, **GREEDY).tolist() == plain.tolist()
    assert recorded[0].num_captured
    assert drafter.stats.why_growing is None
    made = len(recorded)
    returned = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)
    for options, reason in (
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
        ({CACHE: returned[CACHE]}, "a cache of its own"),
    ):
        prompt = returned.sequences if CACHE in options else ids
        target.generate(prompt, assistant_model=drafter, **GREEDY, **options)
        assert reason in drafter.stats.why_growing
        assert reason in str(drafter.stats)
    eagle = make_drafter(target, projector_type="eagle3")
    assert target.generate(ids, assistant_model=eagle, **GREEDY).tolist() == plain.tolist()
    assert "cache_implementation='static'" in eagle.stats.why_growing
    target.generate(ids, assistant_model=drafter, cache_implementation="dynamic", **GREEDY)
    assert drafter.stats.why_growing is None
    assert len(recorded) == made


def test_a_batch_is_tried_again_after_memory_ran_out(make_drafter):
    target, failures = build("Qwen2"), [torch.OutOfMemoryError("out of memory")]

    def fail_once(module, args, kwargs):
        if kwargs.get("use_cache") is False and failures:  # generation has a cache, so this is the trial
            raise failures.pop()

    target.register_forward_pre_hook(fail_once, with_kwargs=True)
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match="OutOfMemoryError: out of memory"):
        both(target, drafter, 3, **GREEDY)
    plain, drafted = both(target, drafter, 3, **GREEDY)
    assert drafted == plain
