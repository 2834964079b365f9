"""Check drafters and targets before any forward; errors name the field, the expected value, the value and a remedy.

The checks run when a drafter and a target meet, and when a batch begins. The checks of a `generate` call are in
`integration.call_checks`, those of a checkpoint in `formats.loading`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import WHY_READABLE, readable_layers
from hf_domino.configuration.domino_config import DominoConfig

# Targets whose forward over several positions after a cache gives other logits than one position at a time (measured),
# or no logits at all, each with the reason.
_IGNORES_STATE = "ignores its recurrent state there"
_CLAMPS_TIME_STEP = "clamps the time step there, and not in plain decode steps"
DEPENDS_ON_WIDTH = {
    "cpmant": "reads the whole text again in every forward",
    "doge": "masks or routes otherwise there",
    "jamba": _IGNORES_STATE,
    "moshi": "sees further back there than in plain decode steps, beyond its window",
    "nemotron_h": _CLAMPS_TIME_STEP,
    "prophetnet": "takes one position at a time",
    "recurrent_gemma": _IGNORES_STATE,
    "zamba": _IGNORES_STATE,
    "zamba2": _CLAMPS_TIME_STEP,
}
ONE_WIDTH = "one whose forward over several new positions equals plain decode steps"
# Fields that count the parallel streams of hidden states (AltUp, hyper-connections).
STREAM_FIELDS = ("altup_num_inputs", "hc_mult", "hc_count")
# These are causal, although their configuration says is_decoder=False by default.
CAUSAL_ANYHOW = ("gpt_neox", "gpt_neox_japanese")
# These are bidirectional over the tokens of one forward, but causal after a cache if their attention gets a mask.
CAUSAL_BEHIND_CACHE = ("gemma", "gemma2")  # in PaliGemma
_LOOK_AHEAD = "see later ones, so the text depends on how many are computed at once"
# Targets without position_ids that allow batches because their positions are relative (ALiBi), and a target that has
# position_ids but counts its padding as text.
RELATIVE_POSITIONS = ("bloom", "mpt")
COUNTS_PADDING = ("git",)
OWN_DRAFTER = (
    "Load the drafter made for this target, or build one with DominoConfig.for_target(target.config). "
    "`hf-domino find TARGET` lists released ones."
)


# --- drafter and target meet ------------------------------------------------------------------------------------


def check_target(config: DominoConfig, target: PreTrainedModel) -> None:
    """Raise an error for a target that the drafter of `config` was not made for, or that no drafter can serve."""
    check_target_kind(target)
    text = target.config.get_text_config(decoder=True)
    pairs = (("hidden_size", "hidden_size"), ("num_target_layers", "num_hidden_layers"))
    for field, target_field in pairs:
        value = getattr(config, field)
        expected = getattr(text, target_field)
        if value not in (None, expected):
            raise invalid_argument(
                f"the drafter's {field}", f"{expected} (the target's {target_field})", value, OWN_DRAFTER
            )
    _check_vocabulary(config, text.vocab_size)
    allowed = readable_layers(config, text.num_hidden_layers)
    layer_ids = config.layer_ids(text)
    if len(layer_ids) != config.num_captured or not all(layer in allowed for layer in layer_ids):
        if len(layer_ids) == config.num_captured:
            count = ""
        else:
            count = f"{config.num_captured} layers "
        bounds = f"{count}in [0, {allowed.stop - 1}]"
        expected = f"{bounds} (the target has {text.num_hidden_layers} layers; {WHY_READABLE})"
        raise invalid_argument("the drafter's target_layer_ids", expected, config.target_layer_ids, OWN_DRAFTER)
    if config.target_model_type not in (None, text.model_type, target.config.model_type):
        remedy = f"{OWN_DRAFTER} If it does fit, set drafter.config.target_model_type = None."
        expected = f"{text.model_type!r} (the target's model_type)"
        raise invalid_argument("the drafter's target_model_type", expected, config.target_model_type, remedy)


def _check_vocabulary(config: DominoConfig, size: int) -> None:
    """Raise an error if a target's `vocab_size` differs from the drafter's and a weight of the drafter depends on it.

    Otherwise it may differ, because it can count padding and added tokens.
    """
    if config.vocab_size == size:
        return
    sized = copy.copy(config)
    sized.vocab_size = size
    if config.learns_while_drafting:
        remedy = "Its table has a row for each token: make another with hf_domino.recycling(target)."
        raise invalid_argument(
            "the drafter's vocab_size", f"{size} (the target's vocab_size)", config.vocab_size, remedy
        )
    if sized.shapes() != config.shapes():
        some = f"drafter.restricted(range({min(size, config.vocab_size - 1)}))"
        remedy = f"{OWN_DRAFTER} If only its W2 or lm_head has another size, use {some}."
        raise invalid_argument(
            "the drafter's vocab_size", f"{size} (the target's vocab_size)", config.vocab_size, remedy
        )
    sized.check()


def unwrapped(model: Any) -> Any:
    """Return the model inside the wrappers of torch.compile, DataParallel or PEFT."""
    for inner in ("_orig_mod", "module", "_orig_mod"):
        model = getattr(model, inner, model)
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def drafter_of(model: Any) -> Any:
    """Return the model inside wrappers of torch.compile, DataParallel or PEFT if it is a drafter; else None."""
    model = unwrapped(model)
    # The class decides, because a stand-in for a model, such as the wrapper of another loop, may have a drafter's
    # configuration.
    config_class = getattr(type(model), "config_class", None)
    if isinstance(config_class, type) and issubclass(config_class, DominoConfig):
        return model
    return None


def fitting_drafter(given: Any, target: PreTrainedModel, field: str) -> Any:
    """Return the drafter inside its wrappers, after a check that it fits the target; errors call it `field`."""
    drafter = drafter_of(given)
    if drafter is None:
        remedy = "Load it with DominoDraftModel.from_pretrained."
        raise invalid_argument(field, "a DominoDraftModel", type(given).__name__, remedy)
    check_drafter(drafter)
    check_target(drafter.config, target)
    return drafter


def check_target_kind(target: PreTrainedModel) -> None:
    """Raise an error for a target that no drafter can serve."""
    name = type(target).__name__
    if drafter_of(target) is not None:
        raise invalid_argument("the target", "a causal language model", f"a drafter ({name})", "Were the two swapped?")
    if target.config.is_encoder_decoder:
        raise invalid_argument(
            f"{name}.config.is_encoder_decoder", False, True, "A drafter reads a decoder-only causal language model."
        )
    # While PEFT generates with its base model, it replaces this method of the base model with its own.
    owner = getattr(getattr(target, "prepare_inputs_for_generation", None), "__self__", None)
    adapter = getattr(owner, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        expected = "one that adds no virtual tokens, such as LoRA"
        remedy = (
            "Virtual tokens do not belong to the text that is drafted; drop assistant_model, or train such an adapter."
        )
        raise invalid_argument("the target's PEFT adapter", expected, adapter.peft_type.value, remedy)
    text = target.config.get_text_config(decoder=True)
    if text.model_type in DEPENDS_ON_WIDTH:
        remedy = f"{name} in transformers {DEPENDS_ON_WIDTH[text.model_type]}; drop assistant_model."
        raise invalid_argument("the target's model_type", ONE_WIDTH, text.model_type, remedy)
    low, high = getattr(text, "time_step_limit", None) or (0, math.inf)
    if low > 0 or high < math.inf:
        remedy = f"{name} in transformers {_CLAMPS_TIME_STEP}; drop assistant_model."
        raise invalid_argument("the target's time_step_limit", (0.0, math.inf), (low, high), remedy)
    if getattr(text, "is_decoder", None) is False and text.model_type not in CAUSAL_ANYHOW:
        remedy = f"Otherwise positions {_LOOK_AHEAD}; load the target with is_decoder=True."
        raise invalid_argument("the target's is_decoder", True, False, remedy)
    if getattr(text, "is_causal", None) is False:  # a field that the attention of any decoder follows
        remedy = f"Otherwise positions {_LOOK_AHEAD}; load the target with is_causal=True."
        raise invalid_argument("the target's is_causal", True, False, remedy)
    if text.model_type not in CAUSAL_BEHIND_CACHE or "flash" in str(text._attn_implementation):
        check_causal(target)
    _check_hidden_states(target, text)


def check_causal(target: PreTrainedModel) -> None:
    """Raise an error for a target whose positions see later positions of the same forward."""
    text = target.config.get_text_config(decoder=True)
    if (value := getattr(text, "use_bidirectional_attention", None)) in (True, "all"):
        remedy = f"Positions {_LOOK_AHEAD}; drop the drafter, or train it for another target."
        raise invalid_argument("the target's use_bidirectional_attention", False, value, remedy)


def _check_hidden_states(target: PreTrainedModel, text: PreTrainedConfig) -> None:
    remedy = "A drafter reads one hidden state per position and layer; this target cannot be drafted for."
    if missing := [name for name in ("vocab_size", "hidden_size", "num_hidden_layers") if not hasattr(text, name)]:
        raise invalid_argument(f"{type(text).__name__}", f"one with {', '.join(missing)}", text.model_type, remedy)
    for field in STREAM_FIELDS:
        if (count := getattr(text, field, None)) is not None:
            raise invalid_argument(f"the target's {field}", "absent (one stream of hidden states)", count, remedy)
    if crossing := getattr(text, "cross_attention_layers", None):
        skipped = "Prompts without an image skip these layers, and their hidden states; drop assistant_model."
        raise invalid_argument("the target's cross_attention_layers", "empty", crossing, skipped)
    if (count := getattr(text, "num_layers", text.num_hidden_layers)) != text.num_hidden_layers:
        raise invalid_argument("the target's num_layers", f"num_hidden_layers={text.num_hidden_layers}", count, remedy)
    width = getattr(target.get_input_embeddings(), "embedding_dim", text.hidden_size)
    if width != text.hidden_size:
        remedy = "A drafter reads token embeddings and hidden states of one width; this target cannot be drafted for."
        raise invalid_argument(
            "the width of the target's token embeddings", f"hidden_size={text.hidden_size}", width, remedy
        )


def check_rows(target: PreTrainedModel, num_proposals: int, kwargs: Mapping[str, Any]) -> None:
    """Raise an error for a batch if the target counts columns, not positions: sequences shift against each other."""
    text = target.config.get_text_config(decoder=True)
    alone = "Generate the prompts one at a time."
    if text.model_type in RELATIVE_POSITIONS:
        return
    if kwargs.get("position_ids") is None and _hides_positions(target):
        remedy = f"Transformers passes positions only to a forward that names them, so add the argument to it. {alone}"
        expected = "one that names position_ids, for a batch"
        raise invalid_argument(f"the forward of {type(target).__name__}", expected, "(*args, **kwargs)", remedy)
    if kwargs.get("position_ids") is None or text.model_type in COUNTS_PADDING:
        expected = "one that takes position_ids and a mask of the padding, for a batch"
        raise invalid_argument(
            "the target's model_type", expected, text.model_type, f"It counts padding as text. {alone}"
        )
    if getattr(text, "attn_temperature_tuning", False):
        limit = text.floor_scale - num_proposals - 1
        longest = kwargs["generation_config"].max_length
        if longest is None or longest > limit:
            remedy = f"From there on the target scales its attention by columns, padding included. {alone}"
            most = f"at most {max(limit, 0)} (floor_scale={text.floor_scale})"
            raise invalid_argument("max_length of a batch", most, longest, remedy)


def _hides_positions(target: PreTrainedModel) -> bool:
    """Return whether a target's forward wraps one that takes position_ids, and does not name them itself."""
    wrapped = [vars(cls)["forward"] for cls in type(target).__mro__ if "forward" in vars(cls)]
    found = ["position_ids" in inspect.signature(forward).parameters for forward in (target.forward, *wrapped)]
    return not found[0] and any(found)


def check_drafter(drafter: PreTrainedModel) -> None:
    """Raise an error for a drafter whose weights are not in memory, or whose correction head is wrapped."""
    empty = [name for name, parameter in drafter.named_parameters() if parameter.is_meta]
    if empty:
        remedy = "Load it with DominoDraftModel.from_pretrained(...) outside of a torch.device('meta') context."
        raise invalid_argument(
            "the drafter's device", "one that holds its weights", f"meta ({len(empty)} tensors)", remedy
        )
    modules = dict(drafter.named_modules())
    layers = drafter.config.head_layers
    own = {name: dict(modules[name].named_parameters(recurse=False)) for name in layers if name in modules}
    if wrapped := [name for name in own if layers[name] not in own[name]]:
        remedy = "Merge the adapter first: peft.PeftModel.from_pretrained(drafter, adapter).merge_and_unload()."
        raise invalid_argument("the layers of the drafter's correction head", "without adapters", wrapped, remedy)
