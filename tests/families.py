"""Every causal language model of the installed Transformers, built small by rule.

Each field of a configuration that is a size is made small, by its name; what a family needs beyond that stands in a
table. Weights are drawn anew, wide enough that text varies, whatever the family's own initialisation is.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE, NUM_LAYERS, WINDOW = 96, 4, 16
WEIGHT_STD = 0.2

_NAMES = (
    (VOCAB_SIZE, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (NUM_LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers num_blocks num_decoder_layers"),
    (NUM_LAYERS, "encoder_layers num_encoder_layers"),
    (WINDOW, "sliding_window sliding_window_size attention_chunk_size attention_window_size window_size floor_scale"),
    (WINDOW, "local_attention local_attn_chunk_length lsh_attn_chunk_length index_topk"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length"),
    (64, "intermediate_size ffn_dim n_inner dim_ff dff encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner"),
    (64, "feed_forward_size mamba_d_ssm dense_intermediate_size intermediate_size_mlp"),
    (32, "hidden_size n_embd d_model dim_model embedding_size embedding_dim word_embed_proj_dim emb_dim lru_width"),
    (32, "attention_hidden_size backbone_hidden_size input_embedding_size output_embedding_size router_hidden_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size"),
    (32, "shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size"),
    (32, "pronunciation_embed_dim shape_embed_dim"),
    (16, "q_lora_rank mamba_d_head mamba_head_dim query_pre_attn_scalar"),
    (16, "index_n_heads"),  # fewer, and many keys score exactly 0: which of them are chosen is then left to chance
    (8, "head_dim d_kv d_head dim_head swa_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim"),
    (8, "linear_value_head_dim linear_head_dim index_head_dim global_head_dim attention_head_dim attention_head_size"),
    (8, "kv_lora_rank o_lora_rank mamba_d_state state_size ssm_state_size kv_channels rotary_dim d_rel mamba_dt_rank"),
    (8, "time_step_rank gated_norm_rank adapter_rank hc_lowrank laurel_rank hidden_size_per_layer_input"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads mamba_n_heads"),
    (4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads mamba_num_heads"),
    (4, "linear_num_value_heads linear_num_heads swa_num_attention_heads"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_key_value_heads num_kv_heads linear_num_key_heads swa_num_key_value_heads num_kv_shared_layers"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_groups n_group topk_group mamba_n_groups mamba_ngroups num_expert_group o_groups"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index prefix_dense_sliding_window_pattern"),
)
FIELDS: dict[str, Any] = {name: size for size, names in _NAMES for name in names.split()}
FIELDS |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "is_decoder": True}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "no_rope_layers")

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
DOTS3 = {"num_key_value_heads": 4, "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
DOTS3 |= {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 8, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8}
DOTS3 |= {"swa_v_head_dim": 8}
QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16}
QWEN4 |= {"indexer_compress_ratio": 4}
WINDOWED = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": WINDOW}
CONVOLVED = {"layer_types": ["conv", "full_attention"] * 2}
ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": NUM_LAYERS},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": WINDOWED | {"rope_parameters": {"full_attention": MROPE, "sliding_attention": MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": WINDOWED | {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {"mamba_d_head": 16},
    "gemma4_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": WINDOWED | {"num_attention_heads_per_layer": [4] * NUM_LAYERS},
    "lfm2": CONVOLVED,
    "lfm2_moe": CONVOLVED,
    "mamba2": {"head_dim": 16},
    "mellum": WINDOWED,
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 4,
    },
    "qwen2": WINDOWED | {"use_sliding_window": True},
    "qwen3": WINDOWED | {"use_sliding_window": True},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": WINDOW},
    "zamba": ZAMBA,
    "zamba2": ZAMBA,
}


def build(model_type: str, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of this type in evaluation mode, with these fields of its configuration."""
    config = tiny_config(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}) | overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=WEIGHT_STD)
    return model


def tiny_config(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of this class with every field that is a size made small."""
    default, overrides = config_class(), dict(overrides)
    fields = {name: _small(name, value) for name, value in default.to_dict().items() if name in (*FIELDS, *PER_LAYER)}
    if "kv_lora_rank" in fields:  # latent attention has keys for every head
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for name in config_class.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            fields[name] = tiny_config(type(part), overrides.pop(name, {}))
    return config_class(**(fields | overrides))


def _small(name: str, value: Any) -> Any:
    if name in PER_LAYER and value:  # all kinds of layers, in turn
        kinds = list(dict.fromkeys(value))
        return [kinds[index % len(kinds)] for index in range(NUM_LAYERS)]
    if name in PER_LAYER or (type(value) is int and value <= 0 and not name.endswith("token_id")):
        return value  # the family does without
    is_size = type(value) is int and not name.endswith("token_id")
    return min(value, FIELDS[name]) if is_size else FIELDS[name]
