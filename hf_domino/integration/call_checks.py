"""Validate a `generate` call before any forward; errors name the field, the allowed values, the value and a remedy.

There are two stages: when `generate` picks its mode, and when the decoding loop gets its inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument
from hf_domino.decoding.caches import unrewindable
from hf_domino.decoding.lookup_memory import check_memory
from hf_domino.decoding.prompt_lookup import DEFAULT_LOOKUP_TOKENS
from hf_domino.decoding.sampling import stateful_processors
from hf_domino.integration.step_checks import check_adapters, check_rope, check_steps, num_given
from hf_domino.targets.compatibility import check_drafter, check_rows, check_target
from hf_domino.targets.view import PER_POSITION

# Arguments that `generate` passes to a loop and that are safe in a batch: they are selected together with the sequences
# that remain, or they are read only once.
SAFE_IN_BATCH = (
    *PER_POSITION,
    *(CACHE, "inputs_embeds", "logits_processor", "stopping_criteria", "streamer", "generation_config"),
    *("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus", "use_cache"),
    # Inputs for images, videos and audio, which are only read together with the prompt.
    *("second_per_grid_ts", "video_second_per_grid", "feature_attention_mask", "audio_feature_lengths"),
    *("image_grid_thw", "video_grid_thw", "input_values", "padding_mask", "input_features", "pixel_values"),
)

# --- generate picks its mode ------------------------------------------------------------------------------------


def _unset(value: object) -> bool:
    return value is None or value is False


def _is_count(value: object) -> bool:
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1)


_ONE_SPEEDUP = "Pass either assistant_model or this option, not both."
_CHANGES_DISTRIBUTION = (
    "It changes the target's output distribution, which assisted decoding preserves; leave it unset."
)
_DRAFTS = "It is the most tokens that a round drafts; leave it unset for as many as the drafter makes."
_PROMPT_LOOKUP = (
    f"A round looks up at most so many tokens; leave it unset for none, or with a memory for {DEFAULT_LOOKUP_TOKENS}."
)
# Numbers. Given as a text, Transformers compares them with a number, or shows them without their quotes:
# "`temperature` (=0.7) has to be a strictly positive float".
_NUMBERS = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), float),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "max_time"), float),
    **dict.fromkeys(("top_k", "max_length", "min_length", "min_new_tokens", "no_repeat_ngram_size"), int),
}
_NEEDS_CACHE = "Verification reuses the target's cache; pass use_cache=True."
_CACHES = "None, 'dynamic' or 'static'"
# Field of the `GenerationConfig`, whether a drafter allows a value, the allowed values in words, the remedy.
GENERATION_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("num_beams", lambda n: n in (None, 1), "1", "Beam search cannot be drafted; drop assistant_model for it."),
    ("use_cache", lambda on: on is not False, "True", _NEEDS_CACHE),
    ("dola_layers", _unset, "None", _CHANGES_DISTRIBUTION),
    ("guidance_scale", lambda s: s in (None, 1, 1.0), "None or 1", _CHANGES_DISTRIBUTION),
    ("assistant_ensemble_weight", _unset, "None", _CHANGES_DISTRIBUTION),
    ("prompt_lookup_num_tokens", _is_count, "None or a number of at least 1", _PROMPT_LOOKUP),
    ("assistant_early_exit", _unset, "None", _ONE_SPEEDUP),
    ("use_mtp", _unset, "False", _ONE_SPEEDUP),
    ("num_assistant_tokens", _is_count, "None or a number of at least 1", _DRAFTS),
    (
        "cache_implementation",
        lambda name: name not in ("sliding_window", "hybrid_chunked"),
        _CACHES,
        "It is an old name of a static cache: pass 'static', which keeps windows of layers, too, or leave it unset.",
    ),
    (
        "cache_implementation",
        lambda name: name in (None, "dynamic", "dynamic_full", "static"),
        _CACHES,
        "Quantized and offloaded caches cannot be rewound after a rejection; leave it unset.",
    ),
)


def check_generation(
    target: PreTrainedModel, drafter: PreTrainedModel, generation_config: GenerationConfig, generation_mode: str
) -> None:
    """Raise an error if assisted decoding does not support the configuration or the mode of a `generate` call."""
    check_drafter(drafter)
    check_target(drafter.config, target)
    check_memory(drafter.memory, "drafter.memory")
    for field, kind in _NUMBERS.items():
        value = getattr(generation_config, field, None)
        if isinstance(value, str):
            remedy = f"Pass it without quotes, or convert the text with {kind.__name__}()."
            raise invalid_argument(field, "a number", value, remedy)
    for field, allows, expected, remedy in GENERATION_RULES:
        value = getattr(generation_config, field, None)
        if not allows(value):
            raise invalid_argument(f"{field} with a Domino assistant_model", expected, value, remedy)
    if generation_mode != "assisted_generation":
        remedy = "Only greedy decoding and sampling can be drafted; drop assistant_model or the option behind the mode."
        value = getattr(generation_mode, "value", generation_mode)
        raise invalid_argument("the generation mode", "'assisted_generation'", value, remedy)


# --- the loop gets its inputs -----------------------------------------------------------------------------------


def check_prepared(
    target: PreTrainedModel, drafter: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]
) -> None:
    """Raise an error if assisted decoding cannot start from a call's inputs, or could change the target's output."""
    config = kwargs["generation_config"]
    batch_size = len(input_ids)
    num_proposals = drafter.config.num_draft_tokens
    check_inputs(target, input_ids, kwargs)
    check_adapters(target, batch_size)
    check_rope(target, num_proposals, input_ids, kwargs)
    _check_step_outputs(target, batch_size, config)
    if batch_size > 1:
        _check_batch(batch_size, kwargs)
        check_rows(target, num_proposals, kwargs)


def check_inputs(target: PreTrainedModel, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Raise an error for prompts and caches that assisted decoding cannot start from."""
    if not (num_new := num_given(input_ids, model_kwargs)):
        raise invalid_argument("the prompt", "of at least one token", "no token", "Pass input_ids or inputs_embeds.")
    if model_kwargs.get("use_cache") is False:
        raise invalid_argument("use_cache", True, False, _NEEDS_CACHE)
    if model_kwargs.get("synced_gpus"):
        remedy = (
            "Sharded targets (DeepSpeed ZeRO-3, FSDP) need rounds in step on all processes; gather the target first."
        )
        raise invalid_argument("synced_gpus", False, True, remedy)
    cache = model_kwargs.get(CACHE)
    if cache is None or not _keeps_keys(target, cache):
        remedy = f"{type(target).__name__} keeps its state elsewhere, which cannot be rewound; drop assistant_model."
        raise invalid_argument("the target's cache", "a DynamicCache", None, remedy)
    is_given = getattr(cache, "_is_user_defined", False)
    remedy = "It cannot be rewound after a rejection; pass a DynamicCache, or cache_implementation instead."
    if not hasattr(cache, "layers") or (is_given and any(isinstance(layer, StaticLayer) for layer in cache.layers)):
        raise invalid_argument(CACHE, "a DynamicCache", type(cache).__name__, remedy)
    if (is_given or not isinstance(cache, StaticCache)) and (kind := unrewindable(cache)):
        raise invalid_argument(f"the layers of {CACHE}", "ones that drop their last positions", kind, remedy)
    mask = model_kwargs.get("attention_mask")
    given = num_new + cache.get_seq_length()
    if mask is not None and mask.dim() == 2 and mask.shape[1] > given:
        expected = f"at most as wide as what is cached and given ({given} positions)"
        raise invalid_argument("attention_mask", expected, mask.shape[1], "Cut it to the tokens it is of.")
    check_steps(target)


def _keeps_keys(target: PreTrainedModel, cache: Any) -> bool:
    """Return whether a target keeps its keys and values in the cache that `generate` prepares for every target."""
    parameters = inspect.signature(type(target).forward).parameters
    are_recurrent = getattr(cache, "is_linear", [])
    # Since Transformers 5.24, a cache that holds only recurrent states (Mamba) is passed under the same name.
    is_taken = CACHE in parameters or "input_ids" not in parameters
    return is_taken and not (are_recurrent and all(are_recurrent))


def _check_step_outputs(target: PreTrainedModel, batch_size: int, generation_config: GenerationConfig) -> None:
    """Raise an error if a call asks for hidden states or attentions that cannot be returned token by token."""
    if not generation_config.return_dict_in_generate:
        return
    for field in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, field) and batch_size > 1:
            remedy = "Generate the prompts one at a time, or call the target on the generated sequences."
            raise invalid_argument(f"{field} with a Domino assistant_model", "False, for a batch", True, remedy)
    attention = getattr(target.config.get_text_config(decoder=True), "_attn_implementation", "eager")
    if generation_config.output_attentions and attention != "eager":
        remedy = 'Load the target with attn_implementation="eager".'
        raise invalid_argument("the target's attn_implementation with output_attentions", "'eager'", attention, remedy)


def _check_batch(batch_size: int, kwargs: Mapping[str, Any]) -> None:
    """Raise an error for inputs that do not allow the sequences of a batch to advance by different lengths."""
    alone = "Generate the prompts one at a time."
    if processors := stateful_processors(kwargs["logits_processor"]):
        expected = "ones of transformers that keep no state, for a batch"
        raise invalid_argument("logits_processor with a Domino assistant_model", expected, processors, alone)
    for processor in kwargs["logits_processor"]:
        encoder_ids = getattr(processor, "encoder_input_ids", None)
        if encoder_ids is None:
            count = getattr(processor, "batch_size", batch_size)
        else:
            count = len(encoder_ids)
        if count != batch_size:
            remedy = "Repeat the prompts instead of asking for several num_return_sequences."
            raise invalid_argument(f"the prompts of {type(processor).__name__}", batch_size, count, remedy)
    mask = kwargs.get("attention_mask")
    cache = kwargs[CACHE]
    if cache.get_seq_length():
        raise invalid_argument(CACHE, "empty, for a batch", f"{cache.get_seq_length()} positions", alone)
    if mask is not None and mask.dim() != 2:
        raise invalid_argument("attention_mask", "of shape (batch, length), for a batch", tuple(mask.shape), alone)
    for name in ("encoder_hidden_states", "image_attention_mask"):
        if kwargs.get(name) is not None:
            raise invalid_argument(name, "None, for a batch", f"a tensor of shape {tuple(kwargs[name].shape)}", alone)
    for name in set(kwargs) - set(SAFE_IN_BATCH) - set(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL):
        value = kwargs[name]
        is_list = isinstance(value, (list, tuple)) or (isinstance(value, torch.Tensor) and value.dim() > 0)
        if is_list and len(value) == batch_size:
            remedy = f"Sequences leave the batch when they end, and it is not known what {name} is. {alone}"
            expected = "no tensor or list with an entry for each sequence, for a batch"
            raise invalid_argument(f"{name} with a Domino assistant_model", expected, f"{len(value)} entries", remedy)
