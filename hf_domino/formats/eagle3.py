"""EAGLE-3 checkpoints of speculators, SpecForge, SGLang, the authors of EAGLE-3 and NVIDIA's Model-Optimizer.

speculators nests the layer's configuration as `transformer_layer_config`. The others store a Llama configuration, to
which Model-Optimizer adds an `eagle_config`. The authors use the target's own class name, so their files are recognised
by a draft vocabulary. Embeddings and lm_head are the drafter's own if they are stored. Captured layers in
`eagle_config` are counted as ours are; at the top level, where vLLM reads them, 0 stands for the embeddings. If a file
lists no layers, they are the first, middle and last ones that EAGLE-3 chooses for the target.

Sources: `src/speculators/models/eagle3/` of vllm-project/speculators (033c87f), `specforge/modeling/draft/
llama3_eagle.py` of sgl-project/SpecForge (01dd714), `python/sglang/srt/models/llama_eagle3.py` of sgl-project/sglang
(03d5a77), `vllm/model_executor/models/llama_eagle3.py` of vllm-project/vllm (00bd149), `eagle/model/cnets.py` and
`eagle/traineagle3/` of SafeAILab/EAGLE (148042c), `modelopt/torch/export/plugins/hf_spec_export.py` of
NVIDIA/Model-Optimizer.
"""

from __future__ import annotations

from collections.abc import Container

from hf_domino.formats.fields import (
    CANNOT_RUN,
    DECODER_SECTION,
    DECODER_SIZES,
    READ_OF_DECODERS,
    TARGET_ONLY,
    Fields,
    Format,
    StoredConfig,
    backbone_fields,
    classes_of,
    decoder_of,
    merged,
    misfit,
    refuse_others_than,
    required,
    section_of,
)
from hf_domino.formats.speculators import DRAFT_VOCAB_SIZE, KIND, layer_ids_of

BLOCK_SIZE = 7  # files do not say how many tokens are drafted
NESTED = "eagle_config"
LAYERS = "eagle_aux_hidden_state_layer_ids"
DEEPSPEC_LAYERS = "target_layer_ids"
ARCHITECTURES = {
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    *("LlamaEagle3DraftModel", "GptOssEagle3DraftModel", "Qwen3Eagle3Model"),
}
# Classes of NeMo Automodel and DeepSpec, which copy the target's configuration. DeepSpec counts layers from 0.
AUTOMODEL = {"LlamaEagle3DraftModel", "GptOssEagle3DraftModel"}
DEEPSPEC = "Qwen3Eagle3Model"
WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields with which other projects vary a drafter, each with the only value that we support.
RUN = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "eh_proj_before_attn": False,
    "bias": False,
    "qkv_bias": False,
    "logit_scale": 1.0,
}


OF_DEEPSPEC = "target_layer_ids num_target_layers draft_num_hidden_layers target_model_name_or_path step_loss_decay"


def _matches(stored: StoredConfig) -> bool:
    if KIND in stored:
        return stored[KIND] == "eagle3"
    classes = classes_of(stored)
    is_authors = "LlamaForCausalLM" in classes and stored.get("draft_vocab_size") is not None
    return bool(ARCHITECTURES & classes) or is_authors


def _read(stored: StoredConfig) -> Fields:
    nested = section_of(stored, NESTED)
    is_nested = KIND in stored
    stored = merged(stored, NESTED)
    classes = classes_of(stored)
    if AUTOMODEL & classes:
        stored = {name: value for name, value in stored.items() if name not in WINDOWS}  # they are the target's
    if DEEPSPEC in classes:
        required(stored, DEEPSPEC_LAYERS)
        stored["model_type"] = "qwen3"
    layer: StoredConfig = stored
    if is_nested:
        required(stored, DECODER_SECTION)
        layer = section_of(stored, DECODER_SECTION)
    else:
        required(stored, *DECODER_SIZES[:4])
    fields = backbone_fields(layer, rotates_whole_heads=DEEPSPEC in classes)
    refuse_others_than({"target_hidden_size": fields["hidden_size"]}, stored)
    window = layer.get("sliding_window")
    longest = fields["max_position_embeddings"]
    is_off = layer.get("use_sliding_window") is False or getattr(decoder_of(layer), "sliding_window", None) is None
    if window is not None and not is_off and window < longest:
        raise misfit("sliding_window", f"absent, or at least {longest} (max_position_embeddings)", window, CANNOT_RUN)
    ids = nested.get(LAYERS) or (stored[DEEPSPEC_LAYERS] if DEEPSPEC in classes else None)
    if ids is None and stored.get(LAYERS):
        ids = layer_ids_of(stored, LAYERS)
    size = stored.get("draft_vocab_size")
    fields |= {
        "block_size": BLOCK_SIZE,
        "draft_vocab_size": DRAFT_VOCAB_SIZE if is_nested and size is None else size,
        "mask_token_id": 0,
        "num_hidden_layers": 1,  # the stored number may be the target's; the tensors are checked against this one
        "num_target_layers": None,
        "target_layer_ids": ids,
        "projector_type": "eagle3",
    }
    return fields | {name: False if stored.get(name) is None else stored[name] for name in FLAGS}


def _check_tensors(stored: StoredConfig, names: Container[str]) -> None:
    """Raise an error if a drafter has its own embeddings, tied to an lm_head that is not stored."""
    is_tied = merged(stored, NESTED).get("tie_word_embeddings")
    if is_tied and "embed_tokens.weight" in names and "lm_head.weight" not in names:
        raise misfit("tie_word_embeddings", "False without an lm_head of its own", True, CANNOT_RUN)


EAGLE3 = Format(
    name="EAGLE-3 (speculators, SpecForge, SGLang, its authors, Model-Optimizer)",
    matches=_matches,
    read=_read,
    renames={r"^(model\.)?midlayer\.": "layers.0."},
    reads=(*READ_OF_DECODERS, *FLAGS, LAYERS, KIND, DECODER_SECTION, NESTED, "draft_vocab_size", "target_hidden_size"),
    only=RUN,
    harmless=("speculators_config", "ttt_*", "embed_requires_grad", *OF_DEEPSPEC.split(), *TARGET_ONLY.split()),
    check_tensors=_check_tensors,
)
