"""Greedy text is the target's own for other architectures: sliding windows, soft caps, experts, absolute positions."""

from __future__ import annotations

import pytest
import torch
import transformers
from builders import left_padded
from oracle import oracle

from hf_domino.targets.view import TargetModel

pytestmark = pytest.mark.transformers

VOCAB = 96
PROMPT = torch.arange(7, 27)[None]
NEW_TOKENS = 20
WINDOW = 16  # shorter than the prompt: rewinding must restore what the window had dropped

BASE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "Mistral": SLIDING,
    "Qwen2": {},
    "Gemma2": {**SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3": {**SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "Gemma4": {
        **SLIDING,
        "head_dim": 8,
        "global_head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,  # they keep nothing in the cache
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "Phi3": SLIDING,
    "Cohere2": SLIDING,
    "GPTNeoX": {},
    "GptOss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "rope_parameters": ROPE},
    "Mixtral": {"num_local_experts": 4},
    "Olmo2": {},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Olmo3": SLIDING,
    "Granite": {},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}


def build(family, **overrides):
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    names = (f"{family}ForCausalLM", f"{family}LMHeadModel")
    model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    sizes = {} if family == "GPT2" else BASE | HEADS
    torch.manual_seed(0)
    config = config_class(**({"vocab_size": VOCAB} | sizes | TOKENS | FAMILIES[family] | overrides))
    return model_class(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_a_batch_is_lossless(family, make_drafter):
    """Left-padded rows that accept different numbers of tokens; a row is the same whatever stands beside it.

    Most drafts are accepted, and some are not.
    """
    target = build(family)
    drafter = make_drafter(target)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12]])
    plain = target.generate(ids, attention_mask=mask, **options)
    with oracle(target, ids, 0.7, plain):
        batch = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert torch.equal(batch, plain)
    assert len({len(row) for row in drafter.stats.rows}) > 1  # rows advanced by themselves
    assert 1.5 < drafter.stats.acceptance_length < drafter.config.num_draft_tokens
    alone = target.generate(ids[:1, mask[0].bool()], assistant_model=drafter, **options)
    assert torch.equal(alone[0, -NEW_TOKENS:], batch[0, -NEW_TOKENS:])


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Gemma3"])
def test_prefill_in_chunks(family, make_drafter):
    target = build(family)
    drafter = make_drafter(target)
    options = {"do_sample": False, "max_new_tokens": 12}
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0]])
    for prompt in ({"input_ids": PROMPT}, {"input_ids": ids, "attention_mask": mask}):
        plain = target.generate(**prompt, **options)
        whole = target.generate(**prompt, assistant_model=drafter, **options)
        rounds = drafter.stats.acceptance_lengths
        assert torch.equal(whole, plain)
        for chunk_size in (1, 7):
            chunked = target.generate(**prompt, assistant_model=drafter, prefill_chunk_size=chunk_size, **options)
            assert torch.equal(chunked, plain)
            assert drafter.stats.acceptance_lengths == rounds  # the drafter saw all of the prompt


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Gemma3", "Gemma4", "GPT2"])
def test_hidden_states_and_attentions(family, make_drafter):
    target = build(family)
    check_step_outputs(target, make_drafter(target))


def check_step_outputs(target, drafter):
    """Hidden states and attentions are those of plain generation, token by token."""
    target.set_attn_implementation("eager")
    wanted = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    options = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": -1}
    plain = target.generate(PROMPT, **options, **wanted)
    with oracle(target, PROMPT, 0.7, plain.sequences):
        assisted = target.generate(PROMPT, assistant_model=drafter, **options, **wanted)
    for name in ("hidden_states", "attentions"):
        ours, theirs = getattr(assisted, name), getattr(plain, name)
        assert len(ours) == len(theirs) == 14
        for mine, other in zip(ours, theirs, strict=True):
            for layer, expected in zip(mine, other, strict=True):
                torch.testing.assert_close(layer, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["GPT2", "Mpt"])
def test_last_position_a_target_can_have(make_drafter, family):
    """Learned positions and tables of biases end: near it fewer tokens are drafted, and the last one is reached."""
    sizes = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 128, "use_cache": True}
    mpt = transformers.MptForCausalLM(transformers.MptConfig(**sizes, **TOKENS)).eval()
    target = mpt if family == "Mpt" else build(family)
    options = {"do_sample": False, "max_new_tokens": 128 - PROMPT.shape[1]}
    plain = target.generate(PROMPT, **options)
    with oracle(target, PROMPT, 0.9, plain):
        assert torch.equal(target.generate(PROMPT, assistant_model=make_drafter(target), **options), plain)


@torch.no_grad()
def test_prompt_beyond_the_length_where_rotary_frequencies_change(make_drafter):
    """Phi-3 starts a cache of its own for such a prompt."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | LONGROPE
    target = build("Phi3", original_max_position_embeddings=16, rope_parameters=rope, sliding_window=None)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    with oracle(target, PROMPT, 0.7, **options):
        assisted = target.generate(PROMPT, assistant_model=make_drafter(target), **options)
    assert torch.equal(assisted, target.generate(PROMPT, **options))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_token_types_repeat_the_last_one(make_drafter, batch_size):
    target = build("GPT2")
    prompts = torch.cat([PROMPT + row for row in range(batch_size)])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "token_type_ids": prompts + 1}
    with oracle(target, prompts, 0.7, **options):
        assisted = target.generate(prompts, assistant_model=make_drafter(target), **options)
    assert torch.equal(assisted, target.generate(prompts, **options))


def test_positions_that_start_late(make_drafter):
    target = build("GPT2")
    length = PROMPT.shape[1]
    positions = torch.arange(128 - NEW_TOKENS - length, 128 - NEW_TOKENS)[None]
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "position_ids": positions}
    with oracle(target, PROMPT, 0.9, **options):
        assisted = target.generate(PROMPT, assistant_model=make_drafter(target), **options)
    assert torch.equal(assisted, target.generate(PROMPT, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_wanted_layers_are_those_of_the_full_tuple(family, make_drafter):
    target = build(family)
    view = TargetModel(target, [0, 2])
    wanted = view.captured(target(PROMPT, **view.capture_kwargs()))
    everything = target(PROMPT, **view.capture_kwargs(capture_all=True)).hidden_states
    assert torch.equal(wanted[0], everything[1])
    assert torch.equal(wanted[1], everything[3])
