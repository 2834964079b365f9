"""A CPU computes each position alone, with the same bits in every forward, and Transformers' attention stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from builders import build_drafter, left_padded
from families import build
from oracle import oracle, tree_faults
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import hf_domino
from hf_domino._common.cache_name import CACHE
from hf_domino.targets.attention import adds_up_evenly, rowwise_attention

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")
# Sums in another order; of logits whose standard deviation is about 1.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}
PROMPTS = [torch.arange(7, 27), torch.arange(30, 35), torch.arange(40, 49)]
PROMPT = PROMPTS[0][None]
SAMPLED = {"do_sample": True, "top_k": 20}
NUM_HEADS, NUM_KEY_VALUE_HEADS = 4, 2
HOW = {
    "a chain": {},
    "sampled": SAMPLED,
    "a tree": {"draft_tree_size": 12},
    "a sampled tree": SAMPLED | {"draft_tree_size": 12},
    "lookup": {"prompt_lookup_num_tokens": 6},
    "recycling": {"assistant": "recycling"},
    "a batch": {"is_batch": True},
    "a batch of trees": SAMPLED | {"is_batch": True, "draft_tree_size": 12},
}


def text_of(target, drafter=None, ids=PROMPT, mask=None, **options):
    torch.manual_seed(5)
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False} | options
    return target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)


def block_logits(target, make_cache=DynamicCache, folded=True, ids=PROMPT, mask=None):
    """Logits of the last five tokens behind a cache of the others."""
    cache = make_cache(config=target.config, **({} if make_cache is DynamicCache else {"max_cache_len": 40}))
    first = None if mask is None else mask[:, :-5]
    with torch.no_grad():
        target(ids[:, :-5], attention_mask=first, **{CACHE: cache})
        if not folded:
            return target(ids[:, -5:], attention_mask=mask, **{CACHE: cache}).logits
        with rowwise_attention(CPU):
            return target(ids[:, -5:], attention_mask=mask, **{CACHE: cache}).logits


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])  # sliding windows and full attention in turn
def test_logits_are_equal_up_to_rounding(model_type, make_cache, dtype):
    target = build(model_type).to(dtype)
    ids, mask = left_padded(PROMPTS)
    expected = block_logits(target, make_cache, False, ids, mask)
    logits = block_logits(target, make_cache, True, ids, mask)
    difference = (logits - expected)[mask[:, -5:].bool()].abs().max() / expected.std()
    assert 0 < difference < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("model_type", ["gemma3_text"])  # sliding windows and full attention in turn
def test_drafts_change_no_bit_of_the_logits(model_type, how, dtype, monkeypatch):
    monkeypatch.setenv("HF_DOMINO_PACKED", "1")
    target = build(model_type).to(dtype)
    options = dict(HOW[how])
    ids, mask = left_padded(PROMPTS) if options.pop("is_batch", False) else (PROMPT, None)
    assistant = options.pop("assistant", None)
    lookup = {name: options.pop(name) for name in list(options) if name.startswith("prompt_lookup")}
    size = options.pop("draft_tree_size", None)
    drafter = assistant or build_drafter(target, draft_tree_size=size).to(dtype)
    options |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 24}
    with hf_domino.packed_linears(target):
        plain = text_of(target, None, ids, mask, **options)
    if size is None:
        right = oracle(target, ids, 0.7, plain.sequences)
    else:
        right = tree_faults(plain.sequences.tolist(), target.config.vocab_size, size)
    with right if assistant is None and not lookup else nullcontext():
        drafted = text_of(target, drafter, ids, mask, **options, **lookup)
    assert torch.equal(drafted.sequences, plain.sequences)
    for step, (found, expected) in enumerate(zip(drafted.logits, plain.logits, strict=True)):
        assert torch.equal(found, expected), step


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch():
    target = build("qwen3")
    ids, mask = left_padded(PROMPTS)
    of_batch = block_logits(target, ids=ids, mask=mask)
    for row, prompt in enumerate(PROMPTS[:1]):
        assert torch.equal(block_logits(target, ids=prompt[None])[0], of_batch[row])


def test_nothing_stays_changed():
    target = build("qwen3")
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def fail(*_):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attend
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), rowwise_attention(CPU), rowwise_attention(CPU):
        fail()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    text_of(target, build_drafter(target))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert target.config._attn_implementation == "sdpa"
    with rowwise_attention(torch.device("cuda")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend


def test_other_threads_keep_their_attention():
    target = build("qwen3")
    expected = block_logits(target, folded=False)
    with rowwise_attention(CPU), ThreadPoolExecutor(1) as pool:
        found = pool.submit(block_logits, target, folded=False).result()
    assert torch.equal(found, expected)


def test_an_attention_of_the_caller_stays():
    target = build("qwen3")
    called = []
    transformers_own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(*args, **options):
        called.append(args[1].shape[2])
        return transformers_own(*args, **options)

    AttentionInterface.register("sdpa", attend)
    try:
        block_logits(target)
    finally:
        AttentionInterface.register("sdpa", transformers_own)
    assert 5 in called


@pytest.mark.parametrize("width", [8, 64])
def test_products_add_up_evenly_on_this_processor(width):
    if "AMD" not in Path("/proc/cpuinfo").read_text() and not adds_up_evenly(width, torch.get_num_threads()):
        pytest.skip("this processor adds up in another order in wider products")
    assert adds_up_evenly(width, torch.get_num_threads())


def test_what_is_compiled_is_traced_whole():
    layer = build("qwen3").model.layers[0].self_attn
    queries, keys = torch.randn(1, NUM_HEADS, 5, 8), torch.randn(1, NUM_KEY_VALUE_HEADS, 9, 8)
    mask = torch.ones(1, 1, 5, 9, dtype=torch.bool).tril(4)

    def attend():
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(layer, queries, keys, keys, mask)[0]

    with torch.no_grad():
        expected = attend()
        with rowwise_attention(CPU):
            traced = torch.compile(attend, backend="eager", fullgraph=True)()
            alone = attend()
    assert torch.equal(traced, expected)
    torch.testing.assert_close(alone, expected)


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("num_queries", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("num_keys", [12, 70, 150])
def test_every_query_sees_the_keys_of_its_own_mask(num_keys, num_queries, num_groups):
    """Masks with holes are those of trees and of sparse attention."""
    torch.manual_seed(0)
    query = torch.randn(1, 2 * num_groups, num_queries, 16)
    key, value = torch.randn(1, 2, num_keys, 16), torch.randn(1, 2, num_keys, 8)
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    holes = seen & (torch.rand(num_queries, num_keys) > 0.5)
    holes[:, num_keys - num_queries :].diagonal().fill_(True)
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    module = torch.nn.Module()
    module.num_key_value_groups = num_groups
    for mask in (seen[None, None], holes[None, None]):
        expected, _ = attend(module, query, key, value, mask)
        with torch.no_grad(), rowwise_attention(CPU):
            found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask)
        torch.testing.assert_close(found, expected)
