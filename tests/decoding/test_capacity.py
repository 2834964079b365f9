"""Caches of fixed shape have room for what is generated, not for what could be, and give way where memory is short."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from builders import left_padded
from oracle import faults
from recorded_graphs import recorded_graphs
from test_families import PROMPT, build

import hf_domino
from hf_domino._common.cache_name import CACHE
from hf_domino.decoding import support
from hf_domino.decoding.static import fixed_cache, workspace

STATIC = {"cache_implementation": "static"}
NUM_NEW = 130  # more than the buffers of a call hold at first
GREEDY = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.8, "top_k": 20}
PROMPTS = {"one": [PROMPT[0]], "batch": [PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12]], "padded": [PROMPT[0, :3]] * 3}


@pytest.fixture(scope="module")
def target():
    return build("Gemma3")


@pytest.fixture(autouse=True)
def fresh_buffers():
    hf_domino.release_workspaces()
    yield
    hf_domino.release_workspaces()


class Memory:
    """Notes the slots of every new buffer of keys or values in a fixed cache; raises where these are too many."""

    def __init__(self):
        self.sizes: list[int] = []
        self.first_limit = self.later_limit = 10**9  # of buffers that are made, and of those that take their place

    def allocate(self, count: int, limit: int) -> None:
        if count > limit:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 4.80 GiB.\nIncluding non-PyTorch memory"
            )
        self.sizes.append(count)


@pytest.fixture
def memory(monkeypatch):
    found = Memory()
    zeros = torch.zeros
    new_zeros = torch.Tensor.new_zeros

    def first(*size, **options):
        if len(size) == 1 and isinstance(size[0], tuple) and len(size[0]) == 4:
            found.allocate(size[0][2], found.first_limit)
        return zeros(*size, **options)

    def later(tensor, *size, **options):
        if len(size) == 4:
            found.allocate(size[2], found.later_limit)
        return new_zeros(tensor, *size, **options)

    monkeypatch.setattr(torch, "zeros", first)
    monkeypatch.setattr(torch.Tensor, "new_zeros", later)
    return found


ALL_CASES = itertools.product(PROMPTS, ({}, {"draft_window_size": 16}, {"draft_tree_size": 12}), ("greedy", "sampled"))
QUICK_CASES = ("one", {}, "greedy"), ("batch", {}, "sampled"), ("padded", {}, "greedy")


@pytest.mark.parametrize(
    ("prompts", "fields", "how"),
    [pytest.param(*case, marks=() if case in QUICK_CASES else pytest.mark.slow) for case in ALL_CASES],
)
def test_buffers_grow_with_the_text(target, make_drafter, memory, prompts, fields, how):
    options = SAMPLED if how == "sampled" else GREEDY
    drafter = make_drafter(target, **fields)
    ids, mask = left_padded(PROMPTS[prompts])
    if prompts == "padded":
        ids = torch.nn.functional.pad(ids, (60, 0))
        mask = torch.nn.functional.pad(mask, (60, 0))
    plain = {}
    with recorded_graphs():
        for extra in ({}, STATIC | {"assistant_model": drafter}):
            torch.manual_seed(2)
            plain[len(extra)] = target.generate(ids, attention_mask=mask, **options, **extra).tolist()
    assert plain[0] == plain[2]
    found = memory.sizes
    assert found == sorted(found)
    assert len(set(found)) > 1
    assert max(found) <= 2 * (ids.shape[1] + NUM_NEW)


def test_a_long_limit_costs_nothing_until_the_text_is_long(target, make_drafter, memory):
    short = GREEDY | {"max_new_tokens": 40}
    end = int(target.generate(PROMPT, **short)[0, 40])
    options = GREEDY | STATIC | {"max_new_tokens": 10**6, "eos_token_id": end}
    expected = target.generate(PROMPT, **short, eos_token_id=end)
    assert target.generate(PROMPT, assistant_model=make_drafter(target), **options).tolist() == expected.tolist()
    assert max(memory.sizes) <= 128


def test_a_capacity_of_the_caller_is_there_from_the_start(target, make_drafter, memory):
    target.generate(
        PROMPT, assistant_model=make_drafter(target), **GREEDY | {"max_new_tokens": 8}, **STATIC, max_cache_len=300
    )
    assert set(memory.sizes) == {320}


@pytest.mark.parametrize("prompts", ["one", "batch"])
@pytest.mark.parametrize("how", ["by name", "by default"])
def test_caches_grow_where_fixed_shapes_take_more_memory_than_there_is(
    target, make_drafter, memory, monkeypatch, prompts, how
):
    drafter = make_drafter(target)
    ids, mask = left_padded(PROMPTS[prompts])
    options = SAMPLED | {"attention_mask": mask, "max_new_tokens": 30}
    torch.manual_seed(2)
    plain = target.generate(ids, **options)
    left_at = torch.get_rng_state()
    if how == "by name":
        options |= STATIC
    else:
        monkeypatch.setattr(support, "uses_static_by_default", lambda input_ids: True)
    target.generate(ids, assistant_model=drafter, **options)  # tries out whether the target takes batches
    hf_domino.release_workspaces()
    memory.first_limit = 0
    torch.manual_seed(2)
    assert target.generate(ids, assistant_model=drafter, **options).tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), left_at)
    assert drafter.stats.why_growing.endswith(
        "more memory than there is: CUDA out of memory. Tried to allocate 4.80 GiB."
    )
    memory.first_limit = 10**9
    torch.manual_seed(2)
    assert target.generate(ids, assistant_model=drafter, **options).tolist() == plain.tolist()
    assert drafter.stats.why_growing is None


@pytest.mark.parametrize("has_graphs", [False, True])
def test_short_texts_get_small_buffers_again_after_a_long_one(target, make_drafter, memory, monkeypatch, has_graphs):
    """At once, or, if that costs new graphs, when several texts in a row were short."""
    monkeypatch.setattr(workspace, "TOO_LARGE", 2)
    monkeypatch.setattr(workspace, "PATIENCE", 2)
    drafter = make_drafter(target)
    plain = target.generate(PROMPT, **GREEDY)

    def sizes_after(num_new):
        memory.sizes.clear()
        options = GREEDY | STATIC | {"max_new_tokens": num_new}
        text = target.generate(PROMPT, assistant_model=drafter, **options)
        assert torch.equal(text, plain[:, : PROMPT.shape[1] + num_new])
        return set(memory.sizes)

    with (
        recorded_graphs() if has_graphs else contextlib.nullcontext(),
        faults(plain.tolist(), target.config.vocab_size),
    ):
        assert sizes_after(8) == {64}
        assert max(sizes_after(NUM_NEW)) == 192
        if has_graphs:
            assert [sizes_after(8) for _ in range(3)] == [set(), set(), {64}]
            assert max(sizes_after(NUM_NEW)) == 192
            assert [sizes_after(NUM_NEW) for _ in range(3)] == [set()] * 3
        else:
            assert [sizes_after(8) for _ in range(2)] == [{64}, set()]


def test_a_buffer_of_fewer_slots_frees_the_others():
    buffer = torch.randn(1, 2, 64, 8)
    fewer = fixed_cache.resized(buffer, 16)
    assert torch.equal(fewer, buffer[:, :, :16])
    assert fewer.untyped_storage().nbytes() == fewer.nbytes


def test_buffers_grow_by_a_step_where_there_is_no_memory_for_twice_as_much(target, make_drafter, memory):
    drafter = make_drafter(target)
    plain = target.generate(PROMPT, **GREEDY | {"max_new_tokens": 180})
    options = GREEDY | STATIC | {"max_new_tokens": 180}
    memory.later_limit = 150
    with faults(plain.tolist(), target.config.vocab_size):
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):  # the text itself takes more
            target.generate(PROMPT, assistant_model=drafter, **options)
        memory.later_limit = 200
        options["max_new_tokens"] = 150
        text = target.generate(PROMPT, assistant_model=drafter, **options)
    assert text.tolist() == plain[:, : PROMPT.shape[1] + 150].tolist()
    assert max(memory.sizes) == 192


@pytest.mark.parametrize("is_static", [False, True], ids=["growing", "fixed shape"])
@pytest.mark.parametrize("prompts", ["one", "batch"])
def test_a_hook_that_shortens_the_cache_is_refused_by_name_and_runs_plain_by_default(
    make_drafter, monkeypatch, prompts, is_static
):
    """As hooks that compress the prompt's keys and values do."""
    monkeypatch.setattr(support, "uses_static_by_default", lambda input_ids: is_static)
    target = build("Qwen2")
    ids, mask = left_padded(PROMPTS[prompts])

    def shorten(module, args, kwargs, outputs):
        layer = kwargs[CACHE].layers[module.layer_idx]
        if kwargs["hidden_states"].shape[1] > 8:
            layer.keys = layer.keys[:, :, -12:]
            layer.values = layer.values[:, :, -12:]

    for layer in target.model.layers:
        layer.self_attn.register_forward_hook(shorten, with_kwargs=True)
    options = GREEDY | {"max_new_tokens": 20, "attention_mask": mask}
    torch.manual_seed(2)
    plain = target.generate(ids, **options)
    drafter = make_drafter(target)
    with pytest.raises(ValueError, match=r"length of the target's cache after a forward must be .* remove the hook"):
        target.generate(ids, assistant_model=drafter, **options)
    hf_domino.attach(target, drafter)
    assert target.generate(ids, **options).tolist() == plain.tolist()
    assert hf_domino.attached(target).num_drafted == 0
    assert list(hf_domino.attached(target).num_plain.values()) == [1]
