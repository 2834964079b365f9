"""Configurations that others write: what must be there, what must agree, and the backbone's fields, both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_domino._common.refusal import refusal
from hf_domino.configuration.checks import FULL, LAYER_TYPES, SLIDING
from hf_domino.formats.format import StoredConfig

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

CORRECT_IT = "Download the checkpoint again, or correct its config.json."
CANNOT_RUN = "hf_domino cannot run this drafter; an engine such as vLLM or SGLang may."
# Fields of DominoConfig that every decoder of Transformers calls the same.
DECODER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# Names of one thing: ours and SpecForge's, that of speculators and DeepSpec, and one of restamped releases.
ORDER = ("shift_label", "sample_from_anchor", "query_zero_predicts_next")
# What is done to embeddings, logits and attention of other block drafters, with the values that do nothing.
UNREAD = {"output_multiplier": 1.0, "input_embedding_scale": 1.0, "final_logit_softcapping": 0.0}
UNREAD |= dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias", "is_causal", "causal"), False)
MOST_LAYERS = 1000  # no decoder has as many, and Transformers makes a list of them
LABELS = "num_labels"  # of a classifier; Transformers makes a list of as many
DTYPE_FIELDS = ("dtype", "torch_dtype")


def required(stored: StoredConfig, *names: str) -> None:
    """Refuse a configuration without one of these fields.

    Args:
        stored (`Mapping`): The configuration, or a section of it.
        names (`str`): Fields.

    Raises:
        ValueError: If one is missing or null.
    """
    for name in names:
        if stored.get(name) is None:
            raise refusal(f"{name} in the checkpoint's config.json", "given", None, CORRECT_IT)


def refuse_unread(stored: StoredConfig) -> None:
    """Refuse what is done to embeddings, logits or attention and is not done here.

    Args:
        stored (`Mapping`): The configuration, with what it nests.

    Raises:
        ValueError: Naming the first such field that has another value than the one that does nothing.
    """
    for name, value in UNREAD.items():
        if stored.get(name) not in (None, value):
            raise refusal(f"{name} in the checkpoint's config.json", value, stored[name], CANNOT_RUN)


def predicts_next(stored: StoredConfig, default: bool) -> Any:
    """Whether position k of a block predicts the token after it, by whichever of its names stands there.

    Args:
        stored (`Mapping`): The configuration, with what it nests.
        default (`bool`): What files of this trainer mean that do not say it.

    Raises:
        ValueError: If two names contradict each other: read in the wrong order, hardly a draft is accepted.
    """
    said = {name: stored[name] for name in ORDER if stored.get(name) is not None}
    for name, value in said.items():
        first = next(iter(said))
        if value != said[first]:
            raise refusal(f"{name} in the checkpoint's config.json", f"{said[first]!r} as {first}", value, CORRECT_IT)
    return next(iter(said.values()), default)


def classes_of(stored: StoredConfig) -> set[str]:
    """The classes that a configuration names; empty where it names none.

    Args:
        stored (`Mapping`): The configuration.

    Raises:
        ValueError: If they are no list of texts.
    """
    classes = stored.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise refusal("architectures in the checkpoint's config.json", "a list of texts", classes, CORRECT_IT)
    return set(classes)


def section_of(stored: StoredConfig, name: str) -> StoredConfig:
    """A nested part of a configuration; empty where there is none.

    Args:
        stored (`Mapping`): The configuration.
        name (`str`): Of the part.

    Raises:
        ValueError: If it is no object.
    """
    section = stored.get(name)
    if section is not None and not isinstance(section, dict):
        raise refusal(f"{name} in the checkpoint's config.json", "an object", section, CORRECT_IT)
    return section or {}


def merged(stored: StoredConfig, section: str) -> dict[str, Any]:
    """A configuration with the fields of one section put beside those of the top level.

    Args:
        stored (`Mapping`): The configuration.
        section (`str`): Its nested part.

    Raises:
        ValueError: If a field has two values.
    """
    nested = section_of(stored, section)
    for name, value in nested.items():
        if stored.get(name, value) not in (value, None) and value is not None:
            expected = f"{value!r} as in {section}.{name}"
            raise refusal(f"{name} in the checkpoint's config.json", expected, stored[name], CORRECT_IT)
    given = {name: value for name, value in nested.items() if value is not None}
    return {**stored, **given}


def backbone_fields(stored: StoredConfig) -> dict[str, Any]:
    """The backbone's fields; what is left out has the default of its architecture in Transformers.

    Args:
        stored (`Mapping`): Configuration of a decoder.

    Returns:
        `dict`: Fields of [`DominoConfig`].

    Raises:
        ValueError: If the layers are others than those of Domino and DFlash drafters.
    """
    _check_theta(stored)
    decoder = decoder_of(stored)
    for name in ("attention_bias", "mlp_bias"):
        if getattr(decoder, name, False):
            raise refusal(name, False, True, CANNOT_RUN)
    values = {name: getattr(decoder, name, None) for name in DECODER_FIELDS}
    if values["head_dim"] is None:
        values["head_dim"] = decoder.hidden_size // decoder.num_attention_heads
    values["dtype"] = next((stored[name] for name in DTYPE_FIELDS if stored.get(name) is not None), None)
    values["rope_parameters"] = _rope_parameters(decoder)
    values |= window_fields(getattr(decoder, "layer_types", None), getattr(decoder, "sliding_window", None))
    return {name: value for name, value in values.items() if value is not None}


def window_fields(layer_types: Any, window: Any, non_causal: bool = False) -> dict[str, Any]:
    """The fields of sliding layers; none where all layers see everything.

    Args:
        layer_types (`list[str]`, *optional*): Of each layer.
        window (`int`, *optional*): Positions that a query of a sliding layer sees, its own included.
        non_causal (`bool`, *optional*, defaults to `False`): Whether it also sees what is behind it in its block.

    Raises:
        ValueError: If there are layers of another kind, or of how large a window is not said.
    """
    if others := sorted(set(layer_types or ()) - set(LAYER_TYPES)):
        raise refusal("layer_types", f"each one of {LAYER_TYPES}", others, CANNOT_RUN)
    if SLIDING not in (layer_types or ()):
        return {}
    if window is None:
        expected = f"given, with use_sliding_window, as layer_types has {SLIDING!r}"
        raise refusal("sliding_window in the checkpoint's config.json", expected, None, CORRECT_IT)
    return {"layer_types": layer_types, "sliding_window": window, "sliding_window_non_causal": non_causal}


def stored_backbone(config: DominoConfig) -> dict[str, Any]:
    """The way back of [`backbone_fields`]: a whole Qwen3 configuration, which no reader's defaults change.

    Args:
        config ([`DominoConfig`]): The drafter's; its `dtype` is that of the weights.
    """
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
    """A decoder's configuration, with Transformers' defaults for what is left out.

    Args:
        stored (`Mapping`): Its fields; `model_type` is `"qwen3"` where there is none.

    Raises:
        ValueError: If Transformers knows no such `model_type`, or it has more layers than any decoder.
    """
    model_type = stored.get("model_type") or "qwen3"
    if model_type not in CONFIG_MAPPING:
        remedy = "A newer transformers may know it."
        raise refusal("model_type of the backbone", "one that transformers knows", model_type, remedy)
    depth = stored.get("num_hidden_layers")
    if isinstance(depth, int) and depth > MOST_LAYERS:
        raise refusal("num_hidden_layers in the checkpoint's config.json", f"at most {MOST_LAYERS}", depth, CORRECT_IT)
    fields = {name: value for name, value in stored.items() if name != LABELS}
    return CONFIG_MAPPING[model_type].from_dict(fields)


def _check_theta(stored: StoredConfig) -> None:
    """Both may be there with different values: Transformers 5 leaves the class's default beside the real one."""
    top = stored.get("rope_theta")
    for place in ("rope_parameters", "rope_scaling"):
        nested = section_of(stored, place).get("rope_theta")
        if None not in (top, nested) and top != nested:
            raise refusal("rope_theta in the checkpoint's config.json", f"{nested} as in {place}", top, CORRECT_IT)


def _rope_parameters(decoder: PreTrainedConfig) -> dict[str, Any]:
    given = getattr(decoder, "rope_parameters", None) or {}
    rope = {name: value for name, value in given.items() if value is not None}
    if "rope_theta" not in rope:
        raise refusal("rope_parameters", "one for all layers, with rope_theta", rope, CANNOT_RUN)
    if (partial := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise refusal("partial_rotary_factor", 1.0, partial, CANNOT_RUN)
    return {"rope_type": "default"} | rope
