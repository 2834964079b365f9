"""Every check that refuses bad input, made before any forward: one error with field, expected, value and remedy.

Four moments: a checkpoint is loaded, drafter and target meet, `generate` picks its mode, the loop gets its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, StaticCache

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

HEAD_MODULES = ("prefix_gru", "embed_proj")
OWN_DRAFTER = "Load the drafter made for this target, or build one with DominoConfig.for_target(target.config)."


def _refusal(field: str, expected: object, value: object, remedy: str) -> ValueError:
    return ValueError(f"{field} must be {expected}, got {value!r}. {remedy}")


# --- a checkpoint is loaded -------------------------------------------------------------------------------------


def check_loading_info(config: DominoConfig, loading_info: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose tensors are not the ones `config` describes.

    Args:
        config (`DominoConfig`): Configuration the drafter was built from.
        loading_info (`Mapping`): What `from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)`
            returns beside the model: `missing_keys`, `unexpected_keys`, `mismatched_keys`.

    Raises:
        ValueError: For a DFlash checkpoint read as Domino or the reverse, and for missing or misshapen weights.
    """
    missing, unexpected = sorted(loading_info["missing_keys"]), sorted(loading_info["unexpected_keys"])
    _check_projector_type(config, missing, unexpected)
    if missing:
        raise _refusal(
            "the checkpoint's tensors",
            f"complete (projector_type={config.projector_type!r})",
            f"a file without {', '.join(missing)}",
            "Save the drafter again with save_pretrained, or download the checkpoint again.",
        )
    for name, stored, wanted in sorted(loading_info["mismatched_keys"]):
        raise _refusal(
            f"the checkpoint's {name}",
            f"of shape {tuple(wanted)} (hidden_size={config.hidden_size}, gru_hidden_dim={config.gru_hidden_dim}, "
            f"emb_dim={config.emb_dim}, vocab_size={config.vocab_size})",
            tuple(stored),
            "Load it with the configuration it was saved with.",
        )


def _check_projector_type(config: DominoConfig, missing: list[str], unexpected: list[str]) -> None:
    has_head = config.projector_type == "domino"
    absent = {name.split(".")[0] for name in missing} >= set(HEAD_MODULES)
    surplus = [name for name in unexpected if name.split(".")[0] in HEAD_MODULES]
    if has_head and absent:
        raise _refusal(
            "projector_type",
            "'dflash' for this checkpoint (it has no prefix_gru and embed_proj: plain DFlash)",
            config.projector_type,
            "Set projector_type='dflash' in its configuration, or load a Domino checkpoint.",
        )
    if not has_head and surplus:
        raise _refusal(
            "projector_type",
            f"'domino' for this checkpoint (it has a correction head: {', '.join(surplus)})",
            config.projector_type,
            "Set projector_type='domino' in its configuration, or load a DFlash checkpoint.",
        )


# --- drafter and target meet ------------------------------------------------------------------------------------


def check_target(config: DominoConfig, target: PreTrainedModel) -> None:
    """Refuse a target that the drafter of `config` was not made for, or that no drafter can serve.

    Args:
        config (`DominoConfig`): The drafter's configuration.
        target (`PreTrainedModel`): The model whose output law is to be preserved.

    Raises:
        ValueError: For encoder-decoder targets, and where sizes, layers or model type differ.
    """
    _check_target_kind(target)
    text = target.config.get_text_config(decoder=True)
    pairs = (("hidden_size", "hidden_size"), ("vocab_size", "vocab_size"), ("num_target_layers", "num_hidden_layers"))
    for field, target_field in pairs:
        value, expected = getattr(config, field), getattr(text, target_field)
        if value != expected:
            raise _refusal(f"the drafter's {field}", f"{expected} (the target's {target_field})", value, OWN_DRAFTER)
    last = text.num_hidden_layers - 2
    if not all(0 <= layer <= last for layer in config.target_layer_ids or ()):
        expected = f"in [0, {last}] (the target has {text.num_hidden_layers} layers; the last one's output is normed)"
        raise _refusal("the drafter's target_layer_ids", expected, config.target_layer_ids, OWN_DRAFTER)
    if config.target_model_type not in (None, text.model_type, target.config.model_type):
        remedy = f"{OWN_DRAFTER} If it does fit, set drafter.config.target_model_type = None."
        expected = f"{text.model_type!r} (the target's model_type)"
        raise _refusal("the drafter's target_model_type", expected, config.target_model_type, remedy)


def _check_target_kind(target: PreTrainedModel) -> None:
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise _refusal(
            f"{name}.config.is_encoder_decoder", False, True, "A drafter reads a decoder-only causal language model."
        )


def check_drafter(drafter: PreTrainedModel) -> None:
    """Refuse a drafter whose weights are not in memory.

    Args:
        drafter (`DominoDraftModel`): The drafter about to be used.

    Raises:
        ValueError: If any parameter is on the meta device.
    """
    empty = [name for name, parameter in drafter.named_parameters() if parameter.is_meta]
    if empty:
        remedy = "Load it with DominoDraftModel.from_pretrained(...) outside of a torch.device('meta') context."
        raise _refusal("the drafter's device", "one that holds its weights", f"meta ({len(empty)} tensors)", remedy)


# --- generate picks its mode ------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """What one field of the `GenerationConfig` may hold beside a drafter."""

    field: str
    allows: Callable[[Any], bool]
    expected: str
    remedy: str


def _unset(value: object) -> bool:
    return value is None or value is False


_ONE_SPEEDUP = "Pass either assistant_model or this option, not both."
_NO_LAW = "It changes the target's output law, which assisted decoding preserves; leave it unset."
_NEEDS_CACHE = "Verification reuses the target's cache; pass use_cache=True."
GENERATION_RULES = (
    _Rule("num_beams", lambda n: n in (None, 1), "1", "Beam search cannot be drafted; drop assistant_model for it."),
    _Rule("use_cache", lambda on: on is not False, "True", _NEEDS_CACHE),
    _Rule("guidance_scale", lambda s: s in (None, 1, 1.0), "None or 1", _NO_LAW),
    _Rule("assistant_ensemble_weight", _unset, "None", _NO_LAW),
    _Rule("prompt_lookup_num_tokens", _unset, "None", _ONE_SPEEDUP),
    _Rule("assistant_early_exit", _unset, "None", _ONE_SPEEDUP),
    _Rule("use_mtp", _unset, "False", _ONE_SPEEDUP),
    _Rule(
        "cache_implementation",
        lambda name: name in (None, "dynamic", "dynamic_full"),
        "None or 'dynamic'",
        "Static, quantized and offloaded caches cannot be rewound after a rejection; leave it unset.",
    ),
)


def check_generation(
    target: PreTrainedModel, drafter: PreTrainedModel, generation_config: GenerationConfig, generation_mode: str
) -> None:
    """Refuse what assisted decoding cannot do, once `generate` knows its configuration and mode.

    Args:
        target (`PreTrainedModel`): The model that generates.
        drafter (`DominoDraftModel`): Its `assistant_model`.
        generation_config (`GenerationConfig`): The merged configuration of the call.
        generation_mode (`str`): The mode Transformers chose from it.

    Raises:
        ValueError: Naming the first field that does not fit.
    """
    check_drafter(drafter)
    check_target(drafter.config, target)
    for rule in GENERATION_RULES:
        value = getattr(generation_config, rule.field, None)
        if not rule.allows(value):
            raise _refusal(f"{rule.field} with a Domino assistant_model", rule.expected, value, rule.remedy)
    if generation_mode != "assisted_generation":
        remedy = "Only greedy decoding and sampling can be drafted; drop assistant_model or the option behind the mode."
        value = getattr(generation_mode, "value", generation_mode)
        raise _refusal("the generation mode", "'assisted_generation'", value, remedy)


# --- the loop gets its inputs -----------------------------------------------------------------------------------


def check_inputs(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse prompts and caches that assisted decoding cannot start from.

    Args:
        input_ids (`torch.Tensor` of shape `(batch, length)`): The prompt.
        model_kwargs (`Mapping`): What `generate` passes on: `use_cache`, `past_key_values`, `synced_gpus`, ...

    Raises:
        ValueError: For an empty prompt, a sharded target, or a cache that cannot be rewound.
    """
    if input_ids.shape[1] == 0 and model_kwargs.get("inputs_embeds") is None:
        raise _refusal("the prompt", "of at least one token", "no token", "Pass input_ids or inputs_embeds.")
    if model_kwargs.get("use_cache") is False:
        raise _refusal("use_cache", True, False, _NEEDS_CACHE)
    if model_kwargs.get("synced_gpus"):
        remedy = (
            "Sharded targets (DeepSpeed ZeRO-3, FSDP) need rounds in step on all processes; gather the target first."
        )
        raise _refusal("synced_gpus", False, True, remedy)
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, StaticCache) or (cache is not None and not hasattr(cache, "layers")):
        remedy = "It cannot be rewound after a rejection; leave it unset or pass a DynamicCache."
        raise _refusal("past_key_values", "a DynamicCache", type(cache).__name__, remedy)


def check_step_outputs(target: PreTrainedModel, batch_size: int, generation_config: GenerationConfig) -> None:
    """Refuse hidden states and attentions where they cannot be returned token by token.

    Args:
        target (`PreTrainedModel`): The model that generates.
        batch_size (`int`): Sequences to generate.
        generation_config (`GenerationConfig`): The merged configuration of the call.

    Raises:
        ValueError: For a batch, and for attentions where the target computes them in a fused kernel.
    """
    if not generation_config.return_dict_in_generate:
        return
    for field in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, field) and batch_size > 1:
            remedy = "Generate the prompts one at a time, or call the target on the generated sequences."
            raise _refusal(f"{field} with a Domino assistant_model", "False, for a batch", True, remedy)
    attention = getattr(target.config.get_text_config(decoder=True), "_attn_implementation", "eager")
    if generation_config.output_attentions and attention != "eager":
        remedy = 'Load the target with attn_implementation="eager".'
        raise _refusal("the target's attn_implementation with output_attentions", "'eager'", attention, remedy)


def check_batch(
    input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], processors: Sequence[str], cache_part: str | None
) -> None:
    """Refuse what cannot be kept in step where rows of a batch advance by different lengths.

    Args:
        input_ids (`torch.Tensor` of shape `(batch, length)`): The prompts.
        model_kwargs (`Mapping`): What `generate` passes on.
        processors (`Sequence[str]`): Names of logits processors that may keep state.
        cache_part (`str`, *optional*): Name of a part of the cache that rows cannot be realigned in.

    Raises:
        ValueError: For such processors and caches, a filled cache, and a mask that is not two-dimensional.
    """
    if len(input_ids) == 1:
        return
    alone = "Generate the prompts one at a time."
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs["past_key_values"]
    if processors:
        expected = "ones of transformers that keep no state, for a batch"
        raise _refusal("logits_processor with a Domino assistant_model", expected, list(processors), alone)
    if cache_part:
        raise _refusal("the target's cache", "made of dynamic attention layers, for a batch", cache_part, alone)
    if cache.get_seq_length():
        raise _refusal("past_key_values", "empty, for a batch", f"{cache.get_seq_length()} positions", alone)
    if mask is not None and mask.dim() != 2:
        raise _refusal("attention_mask", "of shape (batch, length), for a batch", tuple(mask.shape), alone)


def check_native_loop(
    target: PreTrainedModel, batch_size: int, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> None:
    """Refuse what our loop does and Transformers' own assisted loop would get wrong without a word.

    Args:
        target (`PreTrainedModel`): The attached target.
        batch_size (`int`): Sequences to generate.
        generation_config (`GenerationConfig`): The merged configuration of the call.
        model_kwargs (`Mapping`): Keyword arguments of the target's forward.

    Raises:
        ValueError: For what only our loop does, and for stop strings, which it looks for at the end of a round.
    """
    remedy = "Call hf_domino.install() to generate with our loop, which can."
    if getattr(target, "_is_stateful", False):
        raise _refusal(f"{type(target).__name__}._is_stateful in an attached target", False, True, remedy)
    if batch_size > 1:
        raise _refusal("the batch size in an attached target", 1, batch_size, remedy)
    for field in ("output_hidden_states", "output_attentions"):
        if generation_config.return_dict_in_generate and getattr(generation_config, field):
            raise _refusal(f"{field} in an attached target", "False with return_dict_in_generate", True, remedy)
    if generation_config.stop_strings is not None:
        raise _refusal("stop_strings in an attached target", "None", generation_config.stop_strings, remedy)
    cache = model_kwargs.get("past_key_values")
    filled = 0 if cache is None else cache.get_seq_length()
    if filled:
        raise _refusal("past_key_values", "empty in an attached target", f"{filled} positions", remedy)
