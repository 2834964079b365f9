"""The description of a format, and helpers to read, validate and write the configurations of other projects."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import FULL, LAYER_TYPES, SIZES, SLIDING, check_rope_numbers
from hf_domino.configuration.from_target import ROTARY

if TYPE_CHECKING:
    from hf_domino.configuration.domino_config import DominoConfig

StoredConfig = Mapping[str, Any]  # a config.json
Fields = dict[str, Any]  # of a DominoConfig, or of a config.json that is written
CORRECT_IT = "Download the checkpoint again, or correct its config.json."
CANNOT_RUN = "hf_domino cannot run this drafter; an engine such as vLLM or SGLang may."
# Patterns of the names of tensors that some projects store beside a drafter's weights.
TARGET_TENSORS = (
    r"^(model\.)?(embed_tokens|lm_head|verifier_lm_head|verifier_norm)\.weight$",
    r"^t2d$",  # it follows from d2t; without d2t, it says which tokens are drafted
    r"^d2t$",  # only if it covers the whole vocabulary; otherwise it is the drafter's
    r"(^|\.)rotary_emb\.inv_freq$",
)
# Fields of DominoConfig that have the same names in every decoder of Transformers. Most formats require the sizes,
# because a decoder's default sizes are not a drafter's.
DECODER_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "head_dim"),
)
DECODER_FIELDS = (
    *DECODER_SIZES,
    *("hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# Names of one property, that a block position predicts the token after it, each with its value if that is so. They are
# the name that we and SpecForge use, that of speculators and DeepSpec, one of releases whose class was renamed, and
# vLLM's name for a block with a spare anchor.
ORDER = {
    "shift_label": True,
    "sample_from_anchor": True,
    "query_zero_predicts_next": True,
    "dspark_bonus_anchor": False,
}
ROPE_SECTIONS = ("rope_parameters", "rope_scaling")
DECODER_SECTION = "transformer_layer_config"
SECTIONS = ("dflash_config", "dspark_config", "eagle_config", DECODER_SECTION, "speculators_config")
# Features of other block drafters that are not implemented here.
UNSUPPORTED = ["attention_sink_bias", "add_swa_attention_sink_bias", "is_causal", "causal", "dflash_query_causal"]
UNSUPPORTED += ["log_snr_conditioning"]
# Fields that are read of a decoder, and of its rotary embedding.
OF_DECODERS = """
    model_type architectures dtype torch_dtype rope_theta partial_rotary_factor attention_bias mlp_bias
    layer_types sliding_window use_sliding_window
"""
OF_ROPE = """
    rope_type type rope_theta factor original_max_position_embeddings attention_factor truncate beta_fast beta_slow
    mscale mscale_all_dim low_freq_factor high_freq_factor partial_rotary_factor
"""
READ_OF_DECODERS = (*DECODER_FIELDS, *ROPE_SECTIONS, *ROTARY, *OF_DECODERS.split())
# Patterns of fields that change no draft, whoever writes them: fields of Transformers and its older versions, of
# training, and of images.
HARMLESS_ANYWHERE = """
    auto_map *attn_implementation* torchscript pruned_heads add_cross_attention tie_encoder_decoder use_bfloat16
    tf_legacy_loss max_window_layers pretraining_tp tie_word_embeddings *_version *revision verifier*
    num_anchors max_anchors loss_* *_loss* lambda_* train* target_*model_type
    mrope_section mrope_interleaved parallel_drafting
"""
# The same for configurations that are copies of the target's: fields that only matter to the target.
TARGET_ONLY = """
    attn_output_gate output_gate_type full_attention_interval linear_* mtp_* mamba_* mlp_only_layers num_experts*
    moe_* *shared_expert* router_* decoder_sparse_step norm_topk_prob text_config vision_config image_* video_* vision_*
"""
EMPTY: tuple[Any, ...] = (None, "", [], {})  # false and 0 may mean something
HARMLESS = (*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(), *HARMLESS_ANYWHERE.split())
CONVOLUTION = "conv_kernel_size"
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
FUSION = "layer_fusion"
AROUND_LAYERS = (CONVOLUTION, FUSION, *SCALES)  # what is computed around a block's layers
# For each method that other projects write in the same way: the fields of its head that files must state, and those
# that they may leave out.
HEADS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "domino": (("emb_dim", "gru_hidden_dim"), ("pure_draft_prefix_len",)),
    "dflash": ((), ()),
    "dspark": (("markov_rank",), ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")),
    "dflash2": (("selector_rank", "selector_top_k"), ()),
    "dfly": ((), ("hidden_correction_intermediate_size",)),
    "xpress": (("xpress_rank",), ("xpress_mlp_ratio", "num_jacobi_passes")),
}
BLOCK_METHODS = tuple(HEADS)
BLOCK_FIELDS = ("block_size", "mask_token_id", "draft_vocab_size", "num_target_layers", "target_layer_ids")
CODEBOOKS = {
    f"{name}_codebook$": f"{name}_codebook.weight" for name in ("predecessor", "successor")
}  # DFlash 2's matrices, as all other projects name them
CONV_GROUP = "conv_group_size"
READ_OF_HEADS = tuple(name for told_and_options in HEADS.values() for names in told_and_options for name in names)
READ_OF_BLOCKS = (*READ_OF_HEADS, *ORDER, *AROUND_LAYERS, CONV_GROUP, *BLOCK_FIELDS[:3])
LABELS = "num_labels"  # of a classifier; Transformers creates a list of that length
DTYPE_FIELDS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Format:
    """How a project stores drafters."""

    name: str  # in errors
    matches: Callable[[StoredConfig], bool]  # whether a configuration is of this format
    # Returns the fields of DominoConfig that a configuration describes; a ValueError if one is missing or unsupported.
    read: Callable[[StoredConfig], Fields]
    # Returns a drafter's config.json; a ValueError if the format cannot describe the drafter.
    write: Callable[[DominoConfig], Fields] | None = None
    exported_as: str = ""  # its name in `export(format=...)`, if it can be written
    renames: Mapping[str, str] = field(default_factory=dict)  # patterns of tensor names -> replacements, in this order
    reads: Iterable[str] = ()  # its fields that are read, besides those of a nested decoder
    only: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(UNSUPPORTED, False))  # only supported values
    harmless: Sequence[str] = ()  # patterns of its fields that change no draft, besides [`HARMLESS`]
    # Raises an error if a configuration contradicts the names of the stored tensors.
    check_tensors: Callable[[StoredConfig, Container[str]], None] = lambda stored, names: None

    def rename(self, name: str) -> str:
        """Return our name of a stored tensor."""
        for pattern, replacement in self.renames.items():
            name = re.sub(pattern, replacement, name)
        return name

    def unread(self, stored: StoredConfig) -> list[str]:
        """List the fields of a configuration that have a value and are neither read nor harmless."""
        own = {*self.reads, *self.only}
        found = []
        for prefix, place in places_of(stored):
            sections = prefix.split(".")[:-1]
            names: Iterable[str] = own
            if sections and sections[-1] in ROPE_SECTIONS:
                names = (*OF_ROPE.split(), *ROTARY)
            if sections == [DECODER_SECTION]:
                names = (*READ_OF_DECODERS, *self.only)
            harmless = re.compile("|".join(map(fnmatch.translate, (*HARMLESS, *self.harmless, *names))))
            for name, value in place.items():
                if value not in EMPTY and own.issuperset(sections[:1]) and not harmless.match(name):
                    found.append(f"{prefix}{name}")
        return found


def places_of(stored: StoredConfig) -> list[tuple[str, StoredConfig]]:
    """List a configuration and its sections, each with the prefix of its fields' names."""
    found = [("", stored)]
    for prefix, place in found:
        for name in (*SECTIONS, *ROPE_SECTIONS):
            if section := section_of(place, name):
                found.append((f"{prefix}{name}.", section))
    return found


def is_of_target(name: str) -> bool:
    """Return whether a stored tensor is the target's, not one of the drafter's weights."""
    return any(re.search(pattern, name) for pattern in TARGET_TENSORS)


def misfit(name: str, expected: Any, value: Any, remedy: str = CORRECT_IT) -> ValueError:
    """Create the error about a field of a checkpoint's config.json."""
    return invalid_argument(f"{name} in the checkpoint's config.json", expected, value, remedy)


def required(stored: StoredConfig, *names: str) -> None:
    """Raise an error if a configuration, or a section of it, lacks one of these fields."""
    for name in names:
        if stored.get(name) is None:
            raise misfit(name, "given", None)


def refuse_others_than(only: Mapping[str, Any], stored: StoredConfig) -> None:
    """Raise an error for fields that have another value than the one that is supported here."""
    for name, value in only.items():
        if stored.get(name) not in (None, value):
            raise misfit(name, value, stored[name], CANNOT_RUN)


def predicts_next(stored: StoredConfig, default: bool) -> bool:
    """Return whether position k of a block predicts the token after it; `default` is for files that do not say."""
    return _agreed([stored], ORDER, default)  # with the wrong order, hardly any draft would be accepted


def rope_interleaved(stored: StoredConfig, default: bool) -> bool:
    """Return whether the rotary embedding rotates neighbours as a pair, from any field of [`ROTARY`] in any section."""
    return _agreed([place for _, place in places_of(stored)], ROTARY, default)


def _agreed(places: Sequence[StoredConfig], names: Mapping[str, bool], default: bool) -> bool:
    """Read a property that files state under any of several names; raise an error if these disagree."""
    found = default
    said = [(name, place[name]) for place in places for name in names if place.get(name) is not None]
    for index, (name, value) in enumerate(said):
        if not isinstance(value, bool):
            raise misfit(name, "true or false", value)
        if index and found != (value == names[name]):
            raise misfit(name, f"{not value} as {said[0][0]}={said[0][1]} says", value)
        found = value == names[name]
    return found


def block_fields(stored: StoredConfig, method: str) -> Fields:
    """Read what block drafters of all formats state under our names: of the block, the head, and around the layers."""
    needed, options = HEADS[method]
    required(stored, *needed)
    found = {"projector_type": method} | {name: stored.get(name) for name in BLOCK_FIELDS}
    found |= {name: stored[name] for name in (*needed, *options) if stored.get(name) is not None}
    found |= {name: stored[name] for name in (*AROUND_LAYERS, CONV_GROUP) if stored.get(name)}  # a cap of 0 means none
    if method == "dflash2":
        found["draft_pool_size"] = stored["selector_top_k"]
    return found


def stored_head(config: DominoConfig) -> Fields:
    """Return the fields of a head, and of what is around the layers, for a config.json."""
    needed, options = HEADS[config.projector_type]
    around = [name for name in AROUND_LAYERS if getattr(config, name)]
    if config.conv_kernel_size:
        around.append(CONV_GROUP)
    return {name: value for name in (*needed, *options, *around) if (value := getattr(config, name)) is not None}


def classes_of(stored: StoredConfig) -> set[str]:
    """Return the names of the classes in a configuration's `architectures`."""
    classes = stored.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise misfit("architectures", "a list of texts", classes)
    return set(classes)


def section_of(stored: StoredConfig, name: str) -> StoredConfig:
    """Return a section of a configuration; empty if it is missing."""
    section = stored.get(name)
    if section is not None and not isinstance(section, dict):
        raise misfit(name, "an object", section)
    return section or {}


def merged(stored: StoredConfig, *sections: str) -> Fields:
    """Merge the fields of sections into those of the top level; raise an error if they disagree."""
    found = dict(stored)
    for section in sections:
        given = {name: value for name, value in section_of(stored, section).items() if value is not None}
        for name, value in given.items():
            if found.get(name) not in (value, None):
                raise misfit(name, f"{value!r} as in {section}.{name}", found[name])
        found |= given
    return found


def backbone_fields(stored: StoredConfig, rotates_whole_heads: bool = False) -> Fields:
    """Read the backbone's fields from a decoder's configuration, with its architecture's defaults.

    Args:
        stored (`Mapping`): The configuration.
        rotates_whole_heads (`bool`, *optional*, defaults to `False`): Whether the drafter rotates whole heads, so that
            a partial rotation factor is ignored.
    """
    top = stored.get("rope_theta")
    for place in ROPE_SECTIONS:
        check_rope_numbers(section_of(stored, place), place)
        nested = section_of(stored, place).get("rope_theta")
        # They can differ, because Transformers 5 leaves the class's default beside the real value.
        if None not in (top, nested) and top != nested:
            raise misfit("rope_theta", f"{nested} as in {place}", top)
    decoder = decoder_of(stored)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(decoder, name, False):
            raise invalid_argument(name, False, True, CANNOT_RUN)
    values = {name: getattr(decoder, name, None) for name in DECODER_FIELDS}
    if values["head_dim"] is None:
        values["head_dim"] = decoder.hidden_size // decoder.num_attention_heads
    values["dtype"] = next((stored[name] for name in DTYPE_FIELDS if stored.get(name) is not None), None)
    values["rope_parameters"] = _rope_parameters(decoder, rotates_whole_heads)
    values |= window_fields(getattr(decoder, "layer_types", None), getattr(decoder, "sliding_window", None))
    return {name: value for name, value in values.items() if value is not None}


def window_fields(layer_types: Any, window: Any, non_causal: bool = False) -> Fields:
    """Return the fields of sliding layers, whose windows count the query's own position; none if no layer slides."""
    if others := sorted(set(layer_types or ()) - set(LAYER_TYPES)):
        raise invalid_argument("layer_types", f"each one of {LAYER_TYPES}", others, CANNOT_RUN)
    if SLIDING not in (layer_types or ()):
        return {}
    if window is None:
        raise misfit("sliding_window", f"given, with use_sliding_window, as layer_types has {SLIDING!r}", None)
    return {"layer_types": layer_types, "sliding_window": window, "sliding_window_non_causal": non_causal}


def stored_backbone(config: DominoConfig) -> Fields:
    """Return the backbone as a complete Qwen3 configuration, so that no reader's defaults matter."""
    rope = dict(config.rope_parameters or {})
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {name: getattr(config, name) for name in DECODER_FIELDS} | {
        "model_type": "qwen3",
        "attention_bias": False,
        "dtype": str(config.dtype).removeprefix("torch."),
        "layer_types": config.layer_types or [FULL] * config.num_hidden_layers,
        "max_window_layers": config.num_hidden_layers,
        # Transformers 5 reads the first, Transformers 4 the other two.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": config.has_sliding_layers,
    }


def decoder_of(stored: StoredConfig) -> PreTrainedConfig:
    """Build Transformers' configuration of the decoder: Qwen3's, unless `model_type` names another."""
    model_type = stored.get("model_type") or "qwen3"
    if model_type not in CONFIG_MAPPING:
        remedy = "A newer version of transformers may know it."
        raise invalid_argument("model_type of the backbone", "one that transformers knows", model_type, remedy)
    depth = stored.get("num_hidden_layers")
    (_, most) = SIZES["num_hidden_layers"]
    if isinstance(depth, int) and depth > most:  # Transformers creates a list of that length
        raise misfit("num_hidden_layers", f"at most {most}", depth)
    return CONFIG_MAPPING[model_type].from_dict({name: value for name, value in stored.items() if name != LABELS})


def _rope_parameters(decoder: PreTrainedConfig, rotates_whole_heads: bool) -> Fields:
    given = getattr(decoder, "rope_parameters", None) or {}
    rope = {name: value for name, value in given.items() if value is not None and name not in ROTARY}
    if "rope_theta" not in rope:
        raise invalid_argument("rope_parameters", "one for all layers, with rope_theta", rope, CANNOT_RUN)
    if (partial := rope.pop("partial_rotary_factor", 1.0)) != 1.0 and not rotates_whole_heads:
        raise invalid_argument("partial_rotary_factor", 1.0, partial, CANNOT_RUN)
    return {"rope_type": "default"} | rope
