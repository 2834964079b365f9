"""Verification on a CPU repeats no keys, writes plain text, and leaves Transformers' attention as it was."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import build_drafter, left_padded
from families import build
from oracle import oracle, tree_faults
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from hf_domino._common.cache_name import CACHE
from hf_domino.targets.attention import unrepeated_keys

pytestmark = pytest.mark.transformers

CPU = torch.device("cpu")
# Sums in another order; of logits whose standard deviation is about 1.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.1}
PROMPTS = [torch.arange(7, 27), torch.arange(30, 35), torch.arange(40, 49)]
PROMPT = PROMPTS[0][None]
SAMPLED = {"do_sample": True, "top_k": 20}
NUM_HEADS, NUM_KEY_VALUE_HEADS = 4, 2


@pytest.fixture
def seen(monkeypatch):
    """Shapes of all queries and keys that attention is computed of, and whether with a mask."""
    shapes = []
    attend = F.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, **options):
        shapes.append((tuple(query.shape), tuple(key.shape), attn_mask is not None))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return shapes


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
        with unrepeated_keys(CPU):
            return target(ids[:, -5:], attention_mask=mask, **{CACHE: cache}).logits


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])  # sliding windows and full attention in turn
def test_logits_are_equal_up_to_rounding(model_type, make_cache, dtype, seen):
    target = build(model_type).to(dtype)
    ids, mask = left_padded(PROMPTS)
    expected = block_logits(target, make_cache, False, ids, mask)
    assert {keys[1] for _, keys, _ in seen[-4:]} == {NUM_HEADS}
    logits = block_logits(target, make_cache, True, ids, mask)
    groups = NUM_HEADS // NUM_KEY_VALUE_HEADS
    assert {queries[1:3] for queries, _, _ in seen[-4:]} == {(NUM_KEY_VALUE_HEADS, 5 * groups)}
    assert {keys[1] for _, keys, _ in seen[-4:]} == {NUM_KEY_VALUE_HEADS}
    difference = (logits - expected)[mask[:, -5:].bool()].abs().max() / expected.std()
    assert difference < TOLERANCES[dtype]


@pytest.mark.parametrize("options", [{}, SAMPLED, {"cache_implementation": "static"}])
@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gemma3_text"])
def test_texts_of_a_batch_are_plain_text(model_type, options, seen):
    target = build(model_type)
    drafter = build_drafter(target, num_key_value_heads=1)  # its attention is told apart by that
    ids, mask = left_padded(PROMPTS)
    plain = text_of(target, None, ids, mask, **{name: options[name] for name in options if name in SAMPLED})
    seen.clear()
    with oracle(target, ids, 0.7, plain):
        assert torch.equal(text_of(target, drafter, ids, mask, **options), plain)
    assert_no_key_is_repeated(seen)


@pytest.mark.parametrize("options", [{}, SAMPLED, {"cache_implementation": "static"}])
def test_texts_by_trees_are_plain_text(options, seen):
    target = build("qwen3")
    drafter = build_drafter(target, num_key_value_heads=1, draft_tree_size=12)
    plain = text_of(target, **{name: options[name] for name in options if name in SAMPLED})
    seen.clear()
    with tree_faults(plain.tolist(), target.config.vocab_size, 12):
        assert torch.equal(text_of(target, drafter, **options), plain)
    assert_no_key_is_repeated(seen)


def assert_no_key_is_repeated(seen):
    """Of the target's forwards of a few positions behind the longest prompt."""
    length = PROMPT.shape[1]
    of_targets = [queries for queries, keys, _ in seen if keys[1] == NUM_KEY_VALUE_HEADS and keys[2] > length]
    assert NUM_KEY_VALUE_HEADS in [queries[1] for queries in of_targets]
    assert not [queries for queries, keys, _ in seen if keys[1] == NUM_HEADS and queries[2] < length < keys[2]]


def test_nothing_stays_changed():
    target = build("qwen3")
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def fail(*_):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not attend
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), unrepeated_keys(CPU), unrepeated_keys(CPU):
        fail()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    text_of(target, build_drafter(target))
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    assert target.config._attn_implementation == "sdpa"
    with unrepeated_keys(torch.device("cuda")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend


def test_other_threads_keep_their_attention(seen):
    target = build("qwen3")
    with unrepeated_keys(CPU), ThreadPoolExecutor(1) as pool:
        pool.submit(block_logits, target, folded=False).result()
    assert NUM_KEY_VALUE_HEADS not in [keys[1] for _, keys, is_masked in seen if is_masked]


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


def test_heads_without_groups_are_left_to_transformers(seen):
    target = build("qwen3", num_key_value_heads=NUM_HEADS)
    assert torch.equal(block_logits(target), block_logits(target, folded=False))
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


def test_what_is_compiled_is_traced_whole():
    layer = build("qwen3").model.layers[0].self_attn
    queries, keys = torch.randn(1, NUM_HEADS, 5, 8), torch.randn(1, NUM_KEY_VALUE_HEADS, 9, 8)
    mask = torch.ones(1, 1, 5, 9, dtype=torch.bool).tril(4)

    def attend():
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(layer, queries, keys, keys, mask)[0]

    expected = attend()
    with unrepeated_keys(CPU):
        traced = torch.compile(attend, backend="eager", fullgraph=True)()
        folded = attend()
    assert torch.equal(traced, expected)
    torch.testing.assert_close(folded, expected)
