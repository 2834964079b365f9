"""Bad input: each case is refused with one error that names field, value, expected and remedy, before any forward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from builders import TINY
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    StaticCache,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import GenerationMode, MaxLengthCriteria

import hf_domino
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino._common.cache_name import CACHE
from hf_domino.integration.call_checks import check_generation, check_inputs
from hf_domino.integration.step_checks import check_rope
from hf_domino.targets.compatibility import check_rows, check_target

pytestmark = pytest.mark.transformers

PROMPT = torch.tensor([[5, 9, 33, 20]])


@pytest.fixture
def target(tiny_qwen3, monkeypatch):
    """The tiny target, which fails the test if it is ever run."""

    def forward(*args, **kwargs):
        raise AssertionError("a forward ran before the input was refused")

    monkeypatch.setattr(type(tiny_qwen3), "forward", _same_signature(type(tiny_qwen3).forward, forward))
    return tiny_qwen3


def _same_signature(original, replacement):
    replacement.__wrapped__ = original  # generate inspects which arguments forward takes
    return replacement


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 2),
        ("use_cache", False),
        ("dola_layers", "low"),
        ("guidance_scale", 1.5),
        ("assistant_ensemble_weight", 0.5),
        *(("prompt_lookup_num_tokens", value) for value in (0, "10", True)),
        ("assistant_early_exit", 2),
        *(("num_assistant_tokens", value) for value in (0, True)),
        *(("cache_implementation", value) for value in ("offloaded_static", "sliding_window", "hybrid_chunked")),
        ("cache_implementation", "quantized"),
    ],
)
def test_generation_options(target, tiny_drafter, field, value):
    with pytest.raises(ValueError, match=rf"^{field} with a Domino assistant_model must be .*, got {value!r}\. "):
        target.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", "0.7"), ("top_p", "0.9"), ("top_k", "20"), ("min_p", "0.1"), ("typical_p", "0.9")),
        *(("epsilon_cutoff", "3e-4"), ("eta_cutoff", "3e-4"), ("repetition_penalty", "1.1"), ("max_time", "3")),
        *(("top_h", "0.5"), ("encoder_repetition_penalty", "1.1"), ("min_length", "2"), ("min_new_tokens", "2")),
        *(("max_length", "12"), ("no_repeat_ngram_size", "2")),
    ],
)
def test_numbers_that_are_texts(target, tiny_drafter, field, value):
    length = {} if field == "max_length" else {"max_new_tokens": 4}
    with pytest.raises(ValueError, match=rf"^{field} must be a number, got '{value}'\. Pass it without quotes, or"):
        target.generate(PROMPT, assistant_model=tiny_drafter, do_sample=True, **length, **{field: value})


def test_modes_that_cannot_be_drafted(target, tiny_drafter):
    with pytest.raises(ValueError, match=r"generation mode must be 'assisted_generation', got 'contrastive_search'"):
        check_generation(target, tiny_drafter, GenerationConfig(penalty_alpha=0.6), GenerationMode.CONTRASTIVE_SEARCH)


def test_hidden_states_without_return_dict_are_harmless(tiny_qwen3, tiny_drafter):
    options = {"max_new_tokens": 8, "do_sample": False}
    plain = tiny_qwen3.generate(PROMPT, **options)
    assisted = tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, output_hidden_states=True, **options)
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize("field", ["output_hidden_states", "output_attentions"])
def test_step_outputs(target, tiny_drafter, field):
    options = {field: True, "return_dict_in_generate": True, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=rf"{field} .* must be False, for a batch, got True.*one at a time"):
        target.generate(PROMPT.repeat(2, 1), assistant_model=tiny_drafter, **options)
    if field == "output_attentions":
        with pytest.raises(ValueError, match=r"attn_implementation .* must be 'eager', got 'sdpa'"):
            target.generate(PROMPT, assistant_model=tiny_drafter, **options)


def test_sharded_target(tiny_qwen3):
    with pytest.raises(ValueError, match=r"synced_gpus must be False, got True. Sharded targets .* gather the target"):
        check_inputs(tiny_qwen3, PROMPT, {"synced_gpus": True})


def test_cache_that_cannot_be_rewound(target, tiny_drafter):
    cache = StaticCache(config=target.config, max_cache_len=32)
    with pytest.raises(ValueError, match=f"{CACHE} must be a DynamicCache, got 'StaticCache'"):
        target.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4, past_key_values=cache)


@pytest.mark.parametrize(("num_rows", "cache"), [(1, None), (1, "static"), (2, None)])
def test_a_mask_wider_than_the_prompt(target, tiny_drafter, num_rows, cache):
    mask = torch.nn.functional.pad(torch.ones(num_rows, PROMPT.shape[1]), (2, 0))
    options = {"attention_mask": mask, "cache_implementation": cache, "max_new_tokens": 4}
    words = r"attention_mask must be at most as wide as what is cached and given \(4 positions\), got 6. Cut"
    with pytest.raises(ValueError, match=words):
        target.generate(PROMPT.expand(num_rows, -1), assistant_model=tiny_drafter, **options)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 16}, "hidden_size must be 32 .*, got 16"),
        ({"vocab_size": 96}, r"vocab_size must be 64 .*, got 96.*drafter.restricted\(range\(64\)\)"),
        ({"num_target_layers": 7}, "num_target_layers must be 4 .*, got 7"),
        ({"target_model_type": "llama"}, "target_model_type must be 'qwen3' .*, got 'llama'.*target_model_type = None"),
    ],
)
def test_drafter_for_another_target(target, make_drafter, overrides, words):
    with pytest.raises(ValueError, match=words):
        target.generate(PROMPT, assistant_model=make_drafter(target, **overrides), max_new_tokens=4)


def test_layer_ids_out_of_range(target, tiny_drafter):
    config = tiny_drafter.config
    config.target_layer_ids = [1, 4]
    with pytest.raises(ValueError, match=r"target_layer_ids must be in \[0, 3\] .*got \[1, 4\]"):
        target.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4)
    # Files of speculators and EAGLE-3 count no layers, and read the last one before the final norm.
    config.num_target_layers, config.target_layer_ids = None, [1, 3]
    with pytest.raises(ValueError, match=r"in \[0, 2\] .*after the final norm, .* num_target_layers.*got \[1, 3\]"):
        target.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4)


def test_drafter_without_its_weights(target, tiny_drafter):
    with pytest.raises(ValueError, match=r"device must be one that holds its weights, got 'meta.*from_pretrained"):
        target.generate(PROMPT, assistant_model=tiny_drafter.to("meta"), max_new_tokens=4)


def rope_call(rope_type, lengths, new_tokens, cached=0, **kwargs):
    """Check a call on a target whose frequencies change at 32 positions, with 6 proposals a round."""
    target = LlamaForCausalLM(LlamaConfig(**TINY))
    target.config.rope_parameters = {"rope_type": rope_type, "original_max_position_embeddings": 32}
    longest = max(lengths)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in lengths])
    ids = kwargs.pop("input_ids", torch.ones_like(mask))
    cache = SimpleNamespace(get_seq_length=lambda: cached)
    criteria = [MaxLengthCriteria(ids.shape[1] + new_tokens)]
    prepared = {"generation_config": GenerationConfig(), "stopping_criteria": criteria, CACHE: cache}
    check_rope(target, 6, ids, prepared | {"attention_mask": mask} | kwargs)


@pytest.mark.parametrize(
    ("rope_type", "lengths", "new_tokens", "kwargs", "room"),
    [
        # On one side of the change.
        ("dynamic", [16], 10, {}, None),
        ("longrope", [16], 10, {}, None),
        ("longrope", [33], 40, {}, None),
        ("longrope", [40, 33], 40, {}, None),
        ("longrope", [40], 40, {"cached": 36}, None),
        ("yarn", [20], 100, {}, None),
        # Across it.
        ("dynamic", [16], 11, {}, 10),
        ("dynamic", [40], 4, {}, 0),
        ("longrope", [16], 11, {}, 10),
        ("longrope", [32], 40, {}, 0),
        ("longrope", [40, 8], 40, {}, 0),
        ("longrope", [40], 40, {"cached": 20}, 0),
        ("longrope", [16], 20, {"input_ids": torch.ones(1, 0)}, 10),
        ("longrope", [16], 20, {"input_ids": torch.ones(1, 3), "cached": 13}, 10),
        ("dynamic", [4], 20, {"position_ids": torch.arange(12, 16)[None]}, 10),
    ],
)
def test_calls_near_a_change_of_rotary_frequencies(rope_type, lengths, new_tokens, kwargs, room):
    way_out = f"pass max_new_tokens={room}" if room else "drop assistant_model"
    words = f"at most {room}, got {new_tokens}. .* change at 32 positions, .* {way_out}"
    with nullcontext() if room is None else pytest.raises(ValueError, match=words):
        rope_call(rope_type, lengths, new_tokens, **kwargs)


def test_a_change_of_rotary_frequencies_within_the_callers_own_limit(make_drafter):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = LlamaForCausalLM(LlamaConfig(**TINY | {"max_position_embeddings": 32}, rope_parameters=rope)).eval()
    call = {"assistant_model": make_drafter(target), "max_new_tokens": 4}
    with pytest.raises(ValueError, match=r"max_new_tokens behind this prompt .* change at 32 positions"):
        target.generate(PROMPT, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(60)]), **call)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "jamba"}, r"model_type must be one whose forward .* got 'jamba'. .* drop assistant_model"),
        ({"model_type": "zamba2"}, "model_type .* got 'zamba2'. .* clamps the time step there, and not in plain"),
        (
            {"time_step_limit": [0.1, float("inf")]},
            r"time_step_limit must be \(0.0, inf\), got \(0.1, inf\). .* clamps",
        ),
        ({"time_step_limit": (0.0, 0.1)}, r"time_step_limit must be \(0.0, inf\), got \(0.0, 0.1\)"),
        ({"hc_mult": 4}, r"hc_mult must be .*one stream.*, got 4"),
        ({"cross_attention_layers": [3]}, r"cross_attention_layers must be empty, got \[3\]"),
        ({"num_layers": 2}, r"num_layers must be num_hidden_layers=4, got 2"),
        ({"is_decoder": False}, r"is_decoder must be True, got False. .* with is_decoder=True"),
        ({"is_causal": False}, r"is_causal must be True, got False. .* with is_causal=True"),
        (
            {"use_bidirectional_attention": True, "model_type": "gemma", "_attn_implementation": "flash_attention_2"},
            r"use_bidirectional_attention must be False, got True",
        ),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention must be False, got 'all'"),
        # Fields that do no harm.
        ({"time_step_limit": [0.0, float("inf")]}, None),
        ({"is_decoder": False, "model_type": "gpt_neox"}, None),
        ({"is_causal": True}, None),
        ({"use_bidirectional_attention": True, "model_type": "gemma"}, None),
    ],
)
def test_targets_that_cannot_be_drafted_for(tiny_qwen3, make_drafter, fields, words):
    config = make_drafter(tiny_qwen3, target_model_type=None).config
    target = copy.copy(tiny_qwen3)
    target.config = copy.deepcopy(target.config)
    for name, value in fields.items():
        setattr(target.config, name, value)
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_target(config, target)


def test_batches_of_targets_that_count_columns(tiny_qwen3):
    call = {"position_ids": PROMPT, "generation_config": GenerationConfig(max_length=12)}
    target = copy.copy(tiny_qwen3)
    target.config = copy.deepcopy(target.config)
    check_rows(target, 6, call)
    with pytest.raises(
        ValueError, match=r"model_type must be one that takes position_ids .* got 'qwen3'.*one at a time"
    ):
        check_rows(target, 6, call | {"position_ids": None})
    target.config.attn_temperature_tuning, target.config.floor_scale = True, 19
    check_rows(target, 6, call)
    target.config.floor_scale = 18
    with pytest.raises(ValueError, match=r"max_length of a batch must be at most 11 \(floor_scale=18\), got 12"):
        check_rows(target, 6, call)


def test_embeddings_of_another_width(tiny_qwen3, tiny_drafter, monkeypatch):
    monkeypatch.setattr(tiny_qwen3, "get_input_embeddings", lambda: torch.nn.Embedding(64, 16))
    with pytest.raises(ValueError, match=r"token embeddings must be hidden_size=32, got 16"):
        check_target(tiny_drafter.config, tiny_qwen3)


def test_target_that_takes_no_cache(make_drafter, monkeypatch):
    sizes = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
    target = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**sizes, pad_token_id=0))
    monkeypatch.setattr(target.transformer, "forward", lambda *_, **__: pytest.fail("a forward ran"))
    with pytest.raises(ValueError, match=r"cache must be a DynamicCache, got None. OpenAIGPTLMHeadModel .* elsewhere"):
        target.generate(PROMPT, assistant_model=make_drafter(target), max_new_tokens=4)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_targets_with_learned_prompts(target, tiny_drafter, kind):
    prompted = get_peft_model(copy.deepcopy(target), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match=r"PEFT adapter must be one that adds no virtual tokens, .* got 'P.*_TUNING'"):
        prompted.generate(input_ids=PROMPT, assistant_model=tiny_drafter, max_new_tokens=4)


def test_encoder_decoder_target(tiny_drafter):
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=2)
    with pytest.raises(ValueError, match=r"is_encoder_decoder must be False, got True.*decoder-only"):
        T5ForConditionalGeneration(config).generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4)


# --- checkpoints ------------------------------------------------------------------------------------------------


def test_a_target_with_a_projector_is_no_drafter(tiny_qwen3, tiny_drafter, monkeypatch):
    monkeypatch.setattr(tiny_qwen3.config, "projector_type", "mlp", raising=False)  # as those that see have
    plain = tiny_qwen3.generate(PROMPT, max_new_tokens=8)
    assert torch.equal(tiny_qwen3.generate(PROMPT, max_new_tokens=8, assistant_model=tiny_drafter), plain)


def test_dflash_read_as_domino(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in stored.items() if not name.startswith(("prefix_gru", "embed_proj"))}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"projector_type must be 'dflash'.*got 'domino'. Set projector_type='dflash'"):
        DominoDraftModel.from_pretrained(tmp_path)


def test_a_drafter_is_no_target(tiny_qwen3, tiny_drafter):
    with pytest.raises(ValueError, match=r"the target must be a causal language model, got 'a drafter .*swapped"):
        check_target(tiny_qwen3.config, tiny_drafter)
    with pytest.raises(ValueError, match=r"drafter must be a DominoDraftModel, got 'Qwen3ForCausalLM'. The order is"):
        hf_domino.check_fit(tiny_qwen3, tiny_drafter)
    with pytest.raises(ValueError, match=r"must be a configuration, got a Qwen3ForCausalLM: pass target\.config"):
        DominoConfig.for_target(tiny_qwen3)
