"""Configurations of released drafters as they stand on the Hub, the same at reduced size, and folders of them.

Sources: `configs/qwen3-8b-domino.json` and `qwen3-4b-dflash.json` of sgl-project/SpecForge (a6b6b02), which are the
released ones; the export of NVIDIA/Model-Optimizer (0371364); RedHatAI/Qwen3-8B-speculator.dflash (0ac7575) and the
converter of vllm-project/speculators (c05b95b), with the whole vocabulary; `DominoSpeculatorConfig` of its pull request
773; `MuseGlimmerAssistantConfig` of Transformers 5.23. With windows: `configs/qwen3.6-27b-dflash.json` of SpecForge, in
the layout of z-lab's, and what the exports and training recipes of Model-Optimizer and speculators write. JetSpec's is
what `jetspec/models/draft_head.py` of hao-ai-lab/JetSpec (61434d3) reads.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from builders import EOS, MASK, TINY, build_drafter
from huggingface_hub import save_torch_state_dict

QWEN3_8B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LAYER_IDS = [1, 9, 17, 25, 33]
DOMINO_8B = QWEN3_8B | {
    "emb_dim": 256,
    "architectures": ["DominoDraftModel"],
    "auto_map": {"AutoModel": "domino.DominoDraftModel"},
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": LAYER_IDS,
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    },
}
DOMINO_4B = DOMINO_8B | {"hidden_size": 2560, "intermediate_size": 9728, "architectures": ["DFlashDraftModel"]}
DFLASH = QWEN3_8B | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": LAYER_IDS},
}
# From Qwen3.5 on the block size is inside, and Transformers 5 writes rope_parameters.
DFLASH_INSIDE = {key: value for key, value in DFLASH.items() if key not in ("block_size", "rope_theta", "rope_scaling")}
DFLASH_INSIDE |= {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "dflash_config": DFLASH["dflash_config"] | {"block_size": 16},
}
MODEL_OPTIMIZER = {key: value for key, value in DOMINO_8B.items() if key not in ("dtype", "auto_map")}
MODEL_OPTIMIZER |= {
    "torch_dtype": "bfloat16",
    "architectures": ["DFlashDraftModel"],
    "dflash_config": DOMINO_8B["dflash_config"] | {"causal": False},
}
SPECULATORS_DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 16,
    "draft_vocab_size": 151936,
    "mask_token_id": 151669,
    "speculators_model_type": "dflash",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
    # A difference from Qwen3Config: its hidden_size, num_attention_heads and vocab_size are left out.
    "transformer_layer_config": {
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
    },
}
SPECULATORS_DOMINO = SPECULATORS_DFLASH | {
    "architectures": ["DominoSpeculator"],
    "speculators_model_type": "domino",
    "sample_from_anchor": True,
    "gru_hidden_dim": 1024,
    "logits_correction_emb_dim": 256,
    "pure_draft_prefix_len": 1,
}
MUSE_GLIMMER = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "layer_types": ["full_attention"] * 5,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
WINDOWS = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
# Tensor by tensor those above; only what is looked at differs.
WINDOWED = {
    "specforge_windows": DFLASH
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "rope_theta": 10000000,
        "num_target_layers": 64,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    },
    "model_optimizer_windows": MODEL_OPTIMIZER
    | {
        "sliding_window": 2048,
        "dflash_config": MODEL_OPTIMIZER["dflash_config"] | {"use_swa": True, "swa_window_size": 2048},
    },
    # use_swa alone; a causality beside layer_types.
    "swa_windows": DFLASH | {"sliding_window": 2048, "dflash_config": DFLASH["dflash_config"] | {"use_swa": True}},
    "stated_windows": DFLASH | WINDOWS | {"use_sliding_window": True, "is_causal": False},
    "causal_windows": DFLASH
    | WINDOWS
    | {"use_sliding_window": True, "dflash_config": DFLASH["dflash_config"] | {"use_swa": True}},
    "speculators_windows": SPECULATORS_DFLASH
    | {
        "transformer_layer_config": SPECULATORS_DFLASH["transformer_layer_config"]
        | WINDOWS
        | {"use_sliding_window": True},
    },
    "muse_glimmer_windows": MUSE_GLIMMER | WINDOWS,
    "jetspec": DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"causal_head": True}},
}
# The fields of ours that they mean.
MEANT = {
    "specforge_windows": (2048, False),
    "model_optimizer_windows": (2048, True),
    "swa_windows": (2048, True),
    "stated_windows": (2048, True),
    "causal_windows": (2048, False),
    "speculators_windows": (2048, False),
    "muse_glimmer_windows": (2049, True),  # as many before the query's own
    "jetspec": (QWEN3_8B["max_position_embeddings"], False),  # causal inside a block, and no window
}
RELEASED = {
    "specforge_domino": DOMINO_8B,
    "zlab": DFLASH,
    "zlab_inside": DFLASH_INSIDE,
    "model_optimizer": MODEL_OPTIMIZER,
    "speculators_dflash": SPECULATORS_DFLASH,
    "speculators_domino": SPECULATORS_DOMINO,
    "muse_glimmer": MUSE_GLIMMER,
}
# Tensor names of a format: ours -> theirs, by prefix.
PREFIXES = {
    "model_optimizer": {"": "dflash_module."},
    "speculators_domino": {"prefix_gru": "logits_correction.prefix_gru", "embed_proj": "logits_correction.embed_proj"},
    "muse_glimmer": {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."},
    "nested_model": {"": "model."},  # as Transformers saves a model inside another
    "nested_head": {"prefix_gru": "logit_head.prefix_gru", "embed_proj": "logit_head.embed_proj"},
}

SMALL_IDS = [0, 2]
IDS = [0, 3, 4, 9, 11, 40, 62]  # of a draft vocabulary
SMALL = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")} | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "swa_window_size": 8,
    "num_target_layers": 4,
    "target_layer_ids": SMALL_IDS,
    "aux_hidden_state_layer_ids": [layer + 1 for layer in SMALL_IDS],
    "draft_vocab_size": TINY["vocab_size"],
    "mask_token_id": MASK,
    "block_size": 6,
    "emb_dim": 16,
    "logits_correction_emb_dim": 16,
    "gru_hidden_dim": 16,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "dtype": "float32",
    "torch_dtype": "float32",
}
# What a small decoder must say, although the large one is its architecture's default.
SMALL_DECODER = ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")


def reduced(stored: dict[str, Any]) -> dict[str, Any]:
    """A released configuration in the sizes of the tiny target's drafters."""
    small = {key: reduced(value) if isinstance(value, dict) else SMALL.get(key, value) for key, value in stored.items()}
    if "layer_types" in stored:
        small["layer_types"] = stored["layer_types"][-2:]
    if stored.get("sliding_window", 0) is None:
        small["sliding_window"] = None
    if "transformer_layer_config" in small:
        small["transformer_layer_config"] |= {name: SMALL[name] for name in SMALL_DECODER}
    if small.get("model_type") == "muse_glimmer_assistant":
        small["vocab_size"] = SMALL["vocab_size"]
    return small


def changed(stored: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration with fields set, those of a section by dotted names; None takes a field out."""
    stored = copy.deepcopy(stored)
    for name, value in fields.items():
        section, _, inner = name.rpartition(".")
        place = stored.setdefault(section, {}) if section else stored
        place[inner] = value
        if value is None:
            del place[inner]
    return stored


def our_drafter(target: Any, stored: dict[str, Any], **windows: Any) -> Any:
    """The drafter that a reduced released configuration describes, built by hand, with random weights."""
    nested = stored.get("dflash_config", stored)
    is_domino = "projector_type" in nested or stored.get("speculators_model_type") == "domino"
    head = {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1}
    theta = 500000.0 if "muse" in stored.get("model_type", "") else stored.get("rope_theta", 1000000)
    drafter = build_drafter(
        target,
        target_layer_ids=SMALL_IDS,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rms_norm_eps=stored.get("rms_norm_eps", 1e-6),
        **windows,
        **(head if is_domino else {"projector_type": "dflash", "shift_label": False}),
    )
    for layer in (drafter.norm, drafter.hidden_norm):
        torch.nn.init.normal_(layer.weight, mean=1.0, std=0.2)  # fresh norms are all alike
    return drafter


def stored_tensors(drafter: Any, prefixes: dict[str, str]) -> dict[str, torch.Tensor]:
    """A drafter's tensors under the names of a format."""
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        ours = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        theirs = name if ours is None else prefixes[ours] + name.removeprefix(ours)
        tensors[theirs] = tensor.contiguous()
    return tensors


def write_checkpoint(
    folder: Path, stored: dict[str, Any], tensors: dict[str, torch.Tensor], max_shard_size: str = "5GB"
) -> Path:
    """Write config.json and the weights as others do, in one file or several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stored))
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    return folder
