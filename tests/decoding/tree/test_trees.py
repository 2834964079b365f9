"""Rounds that propose trees write plain `generate`'s text, whatever the trees are."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from builders import build_drafter, left_padded
from families import build
from oracle import tree_faults
from transformers import DynamicCache

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding import loop

pytestmark = pytest.mark.transformers

NEW_TOKENS, MOST_NODES = 29, 11  # rounds of every length
TAKE_TREES = (
    "cohere_compass_text",
    "deepseek_v3",
    "gemma3_text",
    "gemma4_text",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "llama",
    "mistral",
    "opt",
    "qwen2_moe",
    "roberta",
)
WHY_CHAIN = {
    "bamba": "a cache with",
    "bart": "positions",
    "bloom": "positions",
    "gpt_neo": "by columns",
    "llama4_text": "by columns",
}
SETTINGS = {
    "greedy": {},
    "seeded": {"do_sample": True, "temperature": 0.8},
    "warped": {"do_sample": True, "top_k": 12, "top_p": 0.9, "temperature": 1.3},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "penalised and seeded": {"repetition_penalty": 1.3, "do_sample": True, "min_new_tokens": 5},
}


def text_of(target, drafter=None, prompt=None, **options):
    """Ids and the state of the default generator behind a call with a fixed seed."""
    prompt = torch.arange(7, 19)[None] if prompt is None else prompt
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": -1, "pad_token_id": 0, "use_cache": True} | options
    torch.manual_seed(0)
    found = target.generate(prompt, **options | ({} if drafter is None else {"assistant_model": drafter}))
    return found, torch.get_rng_state()


def check_equal(target, tree_size=MOST_NODES, kind="domino", is_alone=True, **options):
    """Oracle trees with faults, and the drafter's own trees alone: text and generator are plain's."""
    plain, state = text_of(target, **options)
    drafter, stats = build_drafter(target, draft_tree_size=tree_size, projector_type=kind), []
    truth = tree_faults(plain.tolist(), target.config.vocab_size, tree_size)
    for trees in (truth, contextlib.nullcontext())[: 1 + is_alone]:
        with trees:
            ids, after = text_of(target, drafter, **options)
        assert torch.equal(ids, plain)
        assert torch.equal(after, state)
        assert drafter.stats.chain is None
        stats.append(drafter.stats)
    return stats[0], drafter.config.num_draft_tokens


@pytest.mark.parametrize(("model_type", "do_sample"), [*zip(TAKE_TREES, itertools.cycle((False, True)), strict=False)])
def test_families_that_take_trees_are_exact(model_type, do_sample):
    stats, most = check_equal(build(model_type), is_alone=False, do_sample=do_sample)
    assert set(stats.acceptance_lengths) >= set(range(1, most + 2))


@pytest.mark.parametrize(("model_type", "why"), sorted(WHY_CHAIN.items()))
def test_other_families_get_chains_and_say_why(model_type, why):
    target = build(model_type)
    drafter = build_drafter(target, draft_tree_size=MOST_NODES)
    assert torch.equal(text_of(target, drafter)[0], text_of(target)[0])
    assert why in drafter.stats.chain


@pytest.mark.parametrize(
    ("setting", "tree_size", "kind"),
    [
        *((setting, 30, "domino") for setting in SETTINGS),
        *(("seeded", 1, "domino"), ("penalised", 4, "domino"), ("greedy", 30, "eagle3"), ("penalised", 30, "eagle3")),
        *(("warped", 30, "recycling"), ("penalised and seeded", 30, "recycling")),
        *(("seeded", 30, kind) for kind in ("eagle3", "recycling")),
    ],
)
def test_laws_and_sizes_are_exact(tiny_qwen3, setting, tree_size, kind):
    stats, _ = check_equal(tiny_qwen3, tree_size, kind, **SETTINGS[setting])
    assert max(stats.proposed[0]) >= tree_size


@pytest.mark.parametrize(("mask", "do_sample"), [([0, 0, 0] + [1] * 9, True), ([1, 1, 0, 0, 1] + [1] * 7, False)])
def test_what_a_mask_hides_stays_hidden(tiny_qwen3, mask, do_sample):
    check_equal(tiny_qwen3, attention_mask=torch.tensor([mask]), do_sample=do_sample)


@pytest.mark.parametrize(
    ("model_type", "window", "length", "do_sample"),
    [("gemma3_text", 4, 3, True), ("mistral", 4, 24, False), ("mistral", 16, 3, False), ("gemma3_text", 16, 24, True)],
)
def test_windows_before_in_and_behind_the_prompt_are_exact(model_type, window, length, do_sample):
    target = build(model_type, sliding_window=window)
    check_equal(target, prompt=torch.arange(7, 7 + length)[None], do_sample=do_sample)


@pytest.mark.parametrize("model_type", ["gemma3_text", "mistral"])
def test_windows_are_kept_where_the_callers_cache_knows_none(model_type):
    target = build(model_type)
    drafter = build_drafter(target, draft_tree_size=MOST_NODES)
    plain = text_of(target, past_key_values=DynamicCache())[0]
    with tree_faults(plain.tolist(), target.config.vocab_size, MOST_NODES):
        assert torch.equal(text_of(target, drafter, past_key_values=DynamicCache())[0], plain)
    assert drafter.stats.chain is None


def test_types_of_tokens_are_exact():
    check_equal(build("gpt2"), token_type_ids=torch.arange(12)[None])


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma4_text", "gpt2"])
def test_hidden_states_and_attentions_are_those_of_the_path(model_type):
    target = build(model_type)
    target.set_attn_implementation("eager")
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    plain, drafter = text_of(target, **options)[0], build_drafter(target, draft_tree_size=MOST_NODES)
    with tree_faults(plain.sequences.tolist(), target.config.vocab_size, MOST_NODES):
        ours = text_of(target, drafter, **options)[0]
    assert drafter.stats.chain is None
    torch.testing.assert_close(ours.hidden_states, plain.hidden_states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.attentions, plain.attentions, atol=1e-4, rtol=1e-4)


def test_a_stop_string_ends_the_text(tiny_qwen3, tiny_tokenizer):
    text = tiny_tokenizer.decode(text_of(tiny_qwen3)[0][0])
    for start in range(len(text) // 2, len(text) - 4, 9):
        check_equal(tiny_qwen3, stop_strings=text[start : start + 3], tokenizer=tiny_tokenizer)


def test_an_end_inside_a_branch_ends_the_text(tiny_qwen3):
    plain = text_of(tiny_qwen3)[0][0].tolist()
    for place in range(15, 30, 5):
        check_equal(tiny_qwen3, eos_token_id=plain[place])


def test_scores_and_logits_are_those_of_the_path(tiny_qwen3):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "do_sample": True}
    plain, drafter = text_of(tiny_qwen3, **options)[0], build_drafter(tiny_qwen3, draft_tree_size=MOST_NODES)
    with tree_faults(plain.sequences.tolist(), tiny_qwen3.config.vocab_size, MOST_NODES):
        ours = text_of(tiny_qwen3, drafter, **options)[0]
    torch.testing.assert_close(torch.stack(ours.scores), torch.stack(plain.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)
    keys, expected = ours.past_key_values.layers[2].keys, plain.past_key_values.layers[2].keys
    torch.testing.assert_close(keys, expected[:, :, : keys.shape[2]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("gemma3_text", "domino"),
        ("gemma4_text", "domino"),
        ("llama", "domino"),
        ("mistral", "eagle3"),
    ],
)
def test_a_second_turn_goes_on_from_the_cache(model_type, kind):
    target = build(model_type)
    drafter = build_drafter(target, draft_tree_size=MOST_NODES, projector_type=kind)
    caches = DynamicCache(config=target.config), DynamicCache(config=target.config)
    prompt = torch.arange(7, 19)[None]
    for _ in range(2):
        plain = text_of(target, prompt=prompt, past_key_values=caches[0], max_new_tokens=12)[0]
        with tree_faults(plain.tolist(), target.config.vocab_size, MOST_NODES):
            ours = text_of(target, drafter, prompt, past_key_values=caches[1], max_new_tokens=12)[0]
        assert torch.equal(ours, plain)
        assert drafter.stats.chain is None
        prompt = torch.cat((plain, torch.tensor([[20, 21, 22]])), dim=1)


@pytest.mark.parametrize(
    ("draft_length", "is_batch", "do_sample"),
    [("adaptive", False, True), ("full", False, False), ("full", True, False)],
)
def test_copies_and_trees_write_plain_text(tiny_qwen3, draft_length, is_batch, do_sample):
    prompt = torch.arange(7, 19).repeat(3)[None]
    options = {"prompt": prompt, "do_sample": do_sample}
    if is_batch:
        ids, mask = left_padded([prompt[0], torch.arange(30, 35)])  # there is nothing to copy in a row
        options |= {"prompt": ids, "attention_mask": mask}
    plain = text_of(tiny_qwen3, **options)[0]
    drafter = build_drafter(tiny_qwen3, draft_tree_size=MOST_NODES, draft_length=draft_length)
    for most in (1, 20):
        assert torch.equal(text_of(tiny_qwen3, drafter, **options, prompt_lookup_num_tokens=most)[0], plain)
    assert do_sample or drafter.stats.lookup_length > 1  # what is drawn hardly ever repeats


def test_large_vocabularies_are_verified_from_the_anchor_on(tiny_qwen3, monkeypatch):
    monkeypatch.setattr(loop, "STEPWISE_VOCABULARY", 1)
    for setting in ("penalised", "penalised and seeded"):
        check_equal(tiny_qwen3, **SETTINGS[setting])
    test_an_end_inside_a_branch_ends_the_text(tiny_qwen3)
    test_scores_and_logits_are_those_of_the_path(tiny_qwen3)


@pytest.mark.parametrize(
    ("model_type", "setting", "kind"),
    [
        ("qwen3", "penalised", "domino"),
        *(("gemma3_text", "seeded", "domino"), ("gpt2", "greedy", "domino")),
        ("mistral", "penalised and seeded", "domino"),
        *(("qwen3", "greedy", "eagle3"), ("qwen3", "seeded", "eagle3")),
    ],
)
def test_rows_of_a_batch_grow_trees_of_their_own(model_type, setting, kind):
    ids, mask = left_padded([torch.arange(7, 19), torch.arange(9, 14), torch.arange(30, 39)])
    batch = {"prompt": ids, "attention_mask": mask, "kind": kind}
    stats, most = check_equal(build(model_type).double(), **batch, **SETTINGS[setting])
    assert all(set(row) >= set(range(1, most + 2)) for row in stats.rows)


def test_rows_end_inside_branches_of_their_own(tiny_qwen3):
    ids, mask = left_padded([torch.arange(7, 19), torch.arange(9, 14), torch.arange(30, 39)])
    plain = text_of(tiny_qwen3, prompt=ids, attention_mask=mask)[0]
    for row, place in ((0, 17), (1, 22), (2, 29)):
        check_equal(tiny_qwen3, prompt=ids, attention_mask=mask, eos_token_id=int(plain[row, place]))


def test_calls_that_cannot_take_trees_get_chains_and_say_why(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3, draft_tree_size=MOST_NODES)
    text_of(tiny_qwen3, drafter, do_sample=True, eta_cutoff=1e-3, repetition_penalty=1.2)
    assert "all tokens" in drafter.stats.chain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_does_not_follow_trees_gets_chains(tiny_qwen3, dtype):
    target = copy.deepcopy(tiny_qwen3).to(dtype)
    followed = build_drafter(target, draft_tree_size=MOST_NODES)
    text_of(target, followed)
    assert followed.stats.chain is None
    target = copy.deepcopy(target)
    forward = target.forward

    def by_columns(*args, position_ids=None, **kwargs):
        cached = kwargs[CACHE].get_seq_length() if kwargs.get(CACHE) is not None else 0
        width = kwargs["input_ids"].shape[1]
        return forward(*args, position_ids=torch.arange(cached, cached + width)[None], **kwargs)

    target.forward = by_columns
    drafter = build_drafter(target, draft_tree_size=MOST_NODES)
    if dtype == torch.float32:
        assert torch.equal(text_of(target, drafter)[0], text_of(tiny_qwen3)[0])
    else:
        text_of(target, drafter)
    assert "logits in a tree differ" in drafter.stats.chain


def test_trees_are_tried_again_after_memory_ran_out(tiny_qwen3):
    """Only what the logits say is remembered for the target."""
    target, failures = copy.deepcopy(tiny_qwen3), [torch.OutOfMemoryError("out of memory")]

    def fail_once(module, args, kwargs):
        if kwargs.get("use_cache") is False and failures:  # generation has a cache, so this is the trial
            raise failures.pop()

    target.register_forward_pre_hook(fail_once, with_kwargs=True)
    drafter = build_drafter(target, draft_tree_size=MOST_NODES)
    for why, size in (("OutOfMemoryError: out of memory", None), (None, MOST_NODES)):
        assert torch.equal(text_of(target, drafter)[0], text_of(tiny_qwen3)[0])
        assert why is drafter.stats.chain or why in drafter.stats.chain
        assert drafter.stats.tree_size == size
