"""Checkpoints with a `dflash_config`: of z-lab, SpecForge, Model-Optimizer, JetSpec, and Domino's and XPress's authors.

This module also reads checkpoints that have the same fields only at the top level: DeepSpec's DFlash and DSpark,
AngelSpec's DFly, verl-SpeCo's Domino, and Transformers' own DFlash drafter, `MuseGlimmerAssistantModel`. The
configuration of the last one says nothing about its target. In its sliding layers, a query sees its whole block, and as
many positions before its own as the window has.

The drafter's fields are in `dflash_config`, at the top level, or in both. Layer ids count the layers whose outputs are
read from 0, as ours do. Layers that `layer_types` marks as sliding are causal inside the block unless `causal` says
otherwise. `use_swa` without `layer_types` makes all layers sliding and not causal (`_resolve_layer_attention` of vLLM).
With JetSpec's `causal_head`, all layers are causal inside the block and see the whole context. That is what sliding
layers do whose window is as long as a text can be.

Sources: `specforge/modeling/draft/{dflash,domino}.py` and `configs/` of sgl-project/SpecForge (a6b6b02),
`dflash/model.py` of z-lab/dflash (44947fb), `modelopt/torch/export/plugins/hf_spec_export.py` of
NVIDIA/Model-Optimizer (0371364), `angelspec/models/` and `config/` of Tencent/AngelSpec (d3412be),
`jetspec/models/draft_head.py` of hao-ai-lab/JetSpec (61434d3), `models/muse_glimmer_assistant/`, `masking_utils.py` and
`generation/candidate_generator.py` of Transformers 5.23.
"""

from __future__ import annotations

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import SLIDING
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.fields import (
    BLOCK_METHODS,
    CANNOT_RUN,
    CODEBOOKS,
    CORRECT_IT,
    DECODER_SIZES,
    FUSION,
    READ_OF_BLOCKS,
    READ_OF_DECODERS,
    ROPE_SECTIONS,
    TARGET_ONLY,
    Fields,
    Format,
    StoredConfig,
    backbone_fields,
    block_fields,
    classes_of,
    decoder_of,
    merged,
    misfit,
    predicts_next,
    required,
    section_of,
    stored_backbone,
    stored_head,
    window_fields,
)

SECTION = "dflash_config"
DSPARK_SECTION = "dspark_config"
DOMINO_CLASS = "DominoDraftModel"
DFLASH_CLASS = "DFlashDraftModel"
DFLASH2_CLASS = "DFlash2DraftModel"  # Automodel's class has a longer name that contains this one
DEEPSPEC_CLASS = "Qwen3DSparkModel"  # also of its DFlash, which has no Markov head
DFLY_CLASS = "Qwen3DFlyModel"
XPRESS_CLASS = "Qwen3XPressModel"  # of the authors of XPress
INTERLEAVED_CLASS = "Lfm2DSparkDraftModel"  # of LiquidAI; its rotary embedding rotates neighbours as a pair
ARCHITECTURES = {DOMINO_CLASS, DFLASH_CLASS, "Qwen3DFlashDraftModel", DEEPSPEC_CLASS, DFLASH2_CLASS}
ARCHITECTURES |= {INTERLEAVED_CLASS, DFLY_CLASS, XPRESS_CLASS}
WRITTEN = {"dspark": DEEPSPEC_CLASS, "dflash2": DFLASH2_CLASS}  # other methods are written as DFLASH_CLASS
# Fields that are read, at the top level or in a section.
OWN = """
    projector_type num_target_layers target_num_hidden_layers target_layer_ids use_swa swa_window_size causal_head
    target_config_digest enable_hidden_correction xpress_mlp_hidden xpress_num_passes xpress_block_size
"""
READS = (*READ_OF_DECODERS, *READ_OF_BLOCKS, SECTION, DSPARK_SECTION, *OWN.split())
# Fields that matter only in training or to the target, or that follow from the tensors.
HARMLESS = ("attention_mode", "*confidence_head*", "num_context_layers", "target_hidden_size", *TARGET_ONLY.split())
MUSE_TYPE = "muse_glimmer_assistant"
MUSE_TARGET_TYPE = "muse_glimmer_text"


def _read(stored: StoredConfig) -> Fields:
    stored = merged(stored, SECTION, DSPARK_SECTION)
    classes = classes_of(stored)
    is_next = DEEPSPEC_CLASS in classes or "markov_rank" in stored  # also if its class was renamed
    is_verl = stored.get("model_type") == DominoConfig.model_type  # verl-SpeCo's, whose backbone is Qwen3's
    if DFLY_CLASS in classes or is_verl:
        required(stored, "hidden_size", "num_attention_heads")
        stored.setdefault("head_dim", stored["hidden_size"] // stored["num_attention_heads"])
    if DFLY_CLASS in classes:  # its files have a markov_rank, too, which is 0
        is_next = False
        stored[FUSION] = True
        # In these files, num_target_layers counts the layers that are read.
        stored["num_target_layers"] = stored.get("target_num_hidden_layers")
    if is_verl:
        is_next = True  # it trains drafters in no other order
        stored["model_type"] = "qwen3"
        # In its older files, num_target_layers counts the layers that are read.
        stored["num_target_layers"] = stored.get("target_num_hidden_layers", stored.get("num_target_layers"))
    if XPRESS_CLASS in classes:
        stored |= _xpress_fields(stored)
    required(stored, *DECODER_SIZES, "block_size", "mask_token_id")
    if all(section_of(stored, place).get("rope_theta") is None for place in ROPE_SECTIONS):
        required(stored, "rope_theta")
    # DeepSpec copies its target's partial rotation factor, but rotates whole heads.
    fields = backbone_fields(stored, rotates_whole_heads=is_next)
    fields |= _window_fields(stored, fields) | block_fields(stored, projector_type_of(stored))
    fields["shift_label"] = predicts_next(stored, is_next)
    fields["target_config_digest"] = stored.get("target_config_digest")
    return fields


def _xpress_fields(stored: StoredConfig) -> Fields:
    """Read the fields that the authors of XPress name differently from speculators."""
    required(stored, "xpress_rank", "xpress_mlp_hidden")
    rank = stored["xpress_rank"]
    width = stored["xpress_mlp_hidden"]
    if not isinstance(rank, int) or not isinstance(width, int) or rank < 1 or width % rank:
        raise misfit("xpress_mlp_hidden", f"a multiple of xpress_rank={rank}", width, CANNOT_RUN)
    size = stored.get("block_size")
    if stored.get("xpress_block_size") not in (None, size):
        raise misfit("xpress_block_size", f"{size} as block_size says", stored["xpress_block_size"])
    passes = stored.get("xpress_num_passes", stored.get("num_jacobi_passes"))
    return {"xpress_mlp_ratio": width // rank, "num_jacobi_passes": passes}


def _window_fields(stored: StoredConfig, backbone: Fields) -> Fields:
    """Apply `use_swa`, `causal` and `causal_head` to the sliding windows of the backbone."""
    types = backbone.get("layer_types")
    window = backbone.get("sliding_window")
    non_causal = False in (stored.get("causal"), stored.get("is_causal"))
    if stored.get("causal_head"):
        if types is not None or stored.get("use_swa") or non_causal:
            expected = "left out, or beside it neither sliding windows nor causal=false"
            raise misfit("causal_head", expected, stored["causal_head"], CANNOT_RUN)
        types = [SLIDING] * backbone["num_hidden_layers"]
        window = backbone["max_position_embeddings"]
    elif stored.get("use_swa"):
        non_causal = non_causal or types is None
        types = types or [SLIDING] * backbone["num_hidden_layers"]
        window = stored.get("swa_window_size") or window or stored.get("sliding_window")
    return window_fields(types, window, non_causal)


def projector_type_of(stored: StoredConfig) -> str:
    """Return our `projector_type`; if the field is absent, it follows from the class or from a head's field."""
    classes = classes_of(stored)
    is_domino = DOMINO_CLASS in classes
    implied = "dflash"
    if stored.get("markov_rank"):
        implied = "dspark"
    if is_domino:
        implied = "domino"
    if any(DFLASH2_CLASS in name for name in classes) or stored.get("selector_rank"):
        implied = "dflash2"
    if DFLY_CLASS in classes and stored.get("enable_hidden_correction") is not False:
        implied = "dfly"
    if XPRESS_CLASS in classes:
        implied = "xpress"
    given = stored.get("projector_type") or implied
    if given not in BLOCK_METHODS:
        raise invalid_argument(f"{SECTION}.projector_type", f"one of {', '.join(BLOCK_METHODS)}", given, CANNOT_RUN)
    if is_domino and given != "domino":
        raise invalid_argument(
            f"{SECTION}.projector_type", f"'domino' as architectures says ({DOMINO_CLASS})", given, CORRECT_IT
        )
    return given


def _write(config: DominoConfig) -> Fields:
    """Return a config.json as in the releases: sizes and block size at the top, the drafter's own fields in a section.

    As in DeepSpec, all fields of DSpark are at the top. As in z-lab's files, the section repeats DFlash 2's block size.
    """
    kind = config.projector_type
    section = stored_head(config)
    section |= {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    top = stored_backbone(config) | {
        "architectures": [WRITTEN.get(kind, DFLASH_CLASS)],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }
    if config.has_sliding_layers and config.sliding_window_non_causal:
        # Without these fields, sliding layers are causal inside a block. SGLang reads one of them, vLLM the other.
        top["is_causal"] = section["causal"] = False
    if kind == "domino":
        section |= {"projector_type": kind, "shift_label": config.shift_label}
        top["emb_dim"] = config.emb_dim
    elif kind == "dspark":
        section["sample_from_anchor"] = config.shift_label
    elif config.shift_label:
        section["shift_label"] = True  # only we read it; other projects know only the releases' convention
    if kind == "dflash2":
        section["block_size"] = config.block_size
    if config.target_config_digest is not None:
        top["target_config_digest"] = config.target_config_digest  # only we read it
    return top | (section if kind == "dspark" else {SECTION: section})


DFLASH_CONFIG = Format(
    name="DFlash configuration (z-lab, SpecForge, Model-Optimizer)",
    matches=lambda stored: (
        SECTION in stored
        or bool(ARCHITECTURES & classes_of(stored))
        or stored.get("model_type") == DominoConfig.model_type
    ),
    read=_read,
    write=_write,
    exported_as="specforge",
    # Early files nest the head. Model-Optimizer's files nest the drafter if they were not exported, and the head of its
    # DSpark is not nested. AngelSpec has its own names for the shared tensors.
    renames={
        r"^dflash_module\.": "",
        r"^xpress_head\.w1\.": "refiner_head.token_embed.",
        r"^xpress_head\.w2\.": "refiner_head.readout.",
        r"^xpress_head\.mix\.L$": "refiner_head.mix_l",
        **{rf"^xpress_head\.mlp\.{name}_proj\.": f"refiner_head.mlp_{name}." for name in ("gate", "up", "down")},
        r"^xpress_head\.": "refiner_head.",
        r"^context_proj\.": "fc.",
        r"^context_norm\.": "hidden_norm.",
        r"^final_norm\.": "norm.",
        r"^logit_head\.": "",
        **{rf"^{name}\.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")},
        r"^confidence_proj\.": "confidence_head.proj.",
        **CODEBOOKS,
    },
    reads=READS,
    harmless=HARMLESS,
)


def _read_muse(stored: StoredConfig) -> Fields:
    stored = merged(stored, SECTION)
    vocab_size = stored.get("vocab_size") or decoder_of({"model_type": MUSE_TARGET_TYPE}).vocab_size
    fields = _read(decoder_of(stored).to_dict() | stored | {"vocab_size": vocab_size})
    if "layer_types" in fields:
        fields |= {"sliding_window": fields["sliding_window"] + 1, "sliding_window_non_causal": True}
    return fields


MUSE_GLIMMER = Format(
    name="Muse Glimmer assistant",
    matches=lambda stored: stored.get("model_type") == MUSE_TYPE,
    read=_read_muse,
    renames={r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."},
    reads=READS,
    harmless=HARMLESS,
)
