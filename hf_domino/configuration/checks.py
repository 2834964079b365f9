"""What the fields of a drafter's configuration must be, told by name where one is not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_domino._common.refusal import refusal
from hf_domino.configuration.from_target import ROPE_TYPES
from hf_domino.kinds import KINDS
from hf_domino.kinds.dspark import HEADS
from hf_domino.kinds.kind import SCALES, Kind

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

ADAPTIVE = "adaptive"
CHOICES = {
    "projector_type": tuple(KINDS),
    "markov_head_type": tuple(HEADS),
    "draft_length": (ADAPTIVE, "full"),
}
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
MOST_DRAFTED = 1024  # of a round; releases draft up to 16, trees up to 64, and masks are as large as their square
MOST_POSITIONS = 2**31 - 1  # of a text: kernels count them in 32 bits
MOST = 10**15  # products of two numbers up to it are numbers in fp32
MOST_LAYERS = 10**6  # of a target that does not say how many it has
WHY_READABLE = "the last one's is read after the final norm, and only where num_target_layers is told"
MOST_WIDTH = 2**20  # of a tensor, but for rows of tokens; products of three are counted in 64 bits
WIDTHS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("emb_dim", "gru_hidden_dim", "markov_rank", "selector_rank"),
)
SIZES = {
    "vocab_size": (1, MOST_POSITIONS),
    "num_hidden_layers": (1, 1000),  # no decoder has as many
    **dict.fromkeys(WIDTHS, (1, MOST_WIDTH)),
    "max_position_embeddings": (1, MOST_POSITIONS),
    "block_size": (2, MOST_DRAFTED),
    "selector_top_k": (1, MOST_DRAFTED),
    "conv_group_size": (1, MOST_WIDTH),
}
POSITIVE = (1e-30, MOST)  # numbers in fp32 begin at 1e-38
NUMBERS = {
    **dict.fromkeys(("initializer_range", "rms_norm_eps", *SCALES), POSITIVE),
    "attention_dropout": (0, 1),
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FREQUENCIES = ("low_freq_factor", "high_freq_factor")
ROPE_NUMBERS = {
    "rope_theta": (2, MOST),
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow", *FREQUENCIES), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, MOST)),  # 0 is none
    "original_max_position_embeddings": (1, MOST_POSITIONS),
}
# What is read without a default, by `rope_type`.
ROPE_REQUIRED = {
    "linear": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "llama3": ("factor", "original_max_position_embeddings", *FREQUENCIES),
}


def check_fields(config: DominoConfig) -> None:
    """Refuse a configuration with a field out of its range."""
    _check_sizes(config)
    _check_choices(config)
    _check_numbers(config)
    _check_windows(config)
    _check_target_layer_ids(config)
    _check_fields_of_kinds(config)


def fields_of(kind: type[Kind], *names: str) -> str:
    """Name fields of a kind's configuration for a refusal."""
    return f"{', '.join(names)} of {kind.article} {kind.title} drafter"


def _check_fields_of_kinds(config: DominoConfig) -> None:
    """Refuse fields that a kind does not use, unless they have their one value."""
    others = [kind.own for kind in KINDS.values() if kind is not config.kind]
    for name, value in [pair for fixed in (config.kind.fixed, *others) for pair in fixed.items()]:
        if (given := getattr(config, name)) != value:
            remedy = "Leave it out; no other drafter of this kind can be run."
            raise refusal(fields_of(config.kind, name), value, given, remedy)
    if config.projector_type == "dspark" and config.markov_head_type == "rnn" and not config.shift_label:
        remedy = "Where its state begins is not the same in all projects then; vanilla and gated heads are read."
        raise refusal("shift_label with markov_head_type='rnn'", True, False, remedy)


def _check_range(field: str, value: Any, low: float, high: float | None = None, hint: str = "", is_whole=True) -> None:
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        allowed = "a whole number" if is_whole else "a number"
    elif low <= value <= (math.inf if high is None else high):
        return
    else:
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise ValueError(f"{field} must be {allowed}{f' ({hint})' if hint else ''}, got {value!r}.")


def _check_sizes(config: DominoConfig) -> None:
    for field, allowed in SIZES.items():
        _check_range(field, getattr(config, field), *allowed)
    if config.num_target_layers is not None:
        _check_range("num_target_layers", config.num_target_layers, 1, MOST_LAYERS, "or None")
    if config.draft_pool_size is not None:
        _check_range("draft_pool_size", config.draft_pool_size, 1)
    if (nodes := config.draft_tree_size) not in (None, ADAPTIVE):
        _check_range("draft_tree_size", nodes, 1, MOST_DRAFTED, f"or {ADAPTIVE!r}, or None")
    tokens, drafted = f"vocab_size={config.vocab_size}", f"num_draft_tokens={config.num_draft_tokens}"
    if config.draft_vocab_size is not None:
        _check_range("draft_vocab_size", config.draft_vocab_size, 1, config.vocab_size, tokens)
    _check_range("mask_token_id", config.mask_token_id, 0, config.vocab_size - 1, tokens)
    _check_range("pure_draft_prefix_len", config.pure_draft_prefix_len, 0, config.num_draft_tokens - 1, drafted)
    if (taps := config.conv_kernel_size) is not None:
        _check_range("conv_kernel_size", taps, 1, config.block_size, "block_size, or None")
        width, group = config.hidden_size, config.conv_group_size
        _check_range("conv_group_size", group, 1, width, "hidden_size")
        if width % group:
            raise refusal("conv_group_size", f"a divisor of {width}", group, "Numbers share kernels.")
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {config.head_dim}.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads={config.num_key_value_heads}, "
            f"got {config.num_attention_heads}."
        )


def _check_numbers(config: DominoConfig) -> None:
    """Refuse text, NaN, infinity, and zero where nothing can be computed with it, in other fields than sizes."""
    for field, limits in NUMBERS.items():
        if (value := getattr(config, field)) is not None or field not in SCALES:
            _check_range(field, value, *limits, is_whole=False)
    for field in TOKEN_IDS:
        ids = getattr(config, field)
        for token in ids if isinstance(ids, (list, tuple)) else [ids]:
            if token is not None:
                _check_range(field, token, -1, MOST_POSITIONS)  # some targets say -1 for none
    rope = config.rope_parameters or {}
    partial = rope.get("partial_rotary_factor", 1)
    _check_range("rope_parameters['partial_rotary_factor']", partial, 1, 1, is_whole=False)
    check_rope_numbers(rope, required=("rope_theta", *ROPE_REQUIRED.get(rope.get("rope_type", "default"), ())))


def check_rope_numbers(rope: Mapping[str, Any], section: str = "rope_parameters", required: Sequence[str] = ()) -> None:
    """Refuse a rotary embedding with a number out of its range, and one that differs by layer.

    Args:
        rope (`Mapping[str, Any]`): The rotary embedding, as in a configuration.
        section (`str`, *optional*, defaults to `"rope_parameters"`): Its name in the configuration, for the error.
        required (`Sequence[str]`, *optional*, defaults to `()`): Fields that must not be None.

    Raises:
        ValueError: If a number is out of its range; the message names the field, its range and its value.
    """
    for field, limits in ROPE_NUMBERS.items():
        value = rope.get(field)
        if value is not None or field in required:
            _check_range(f"{section}[{field!r}]", value, *limits, is_whole=False)
    for field, value in rope.items():
        if isinstance(value, dict):
            raise refusal(f"{section}[{field!r}]", "absent", value, "All layers share one rotary embedding.")
    low, high = (rope.get(field) for field in FREQUENCIES)
    if low is not None and high is not None and low >= high:
        expected = f"more than low_freq_factor={low}"
        raise refusal(f"{section}['high_freq_factor']", expected, high, "Correct config.json.")


def _check_choices(config: DominoConfig) -> None:
    for field, allowed in CHOICES.items():
        if getattr(config, field) not in allowed:
            raise ValueError(f"{field} must be one of {allowed}, got {getattr(config, field)!r}.")
    if config.norm_before_fc and config.fc_norm:
        raise ValueError("fc_norm must be False with norm_before_fc=True, got True.")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_parameters['rope_type'] must be one of {ROPE_TYPES}, got {rope_type!r}.")


def _check_windows(config: DominoConfig) -> None:
    types, window = config.layer_types, config.sliding_window
    if types is not None and (len(types) != config.num_hidden_layers or not set(types) <= set(LAYER_TYPES)):
        raise ValueError(
            f"layer_types must be one of {LAYER_TYPES} for each layer (num_hidden_layers={config.num_hidden_layers}), "
            f"got {types}."
        )
    if config.has_sliding_layers:
        hint = f"block_size={config.block_size}; layer_types has {SLIDING!r}"
        _check_range("sliding_window", window, config.block_size, MOST_POSITIONS, hint)
    elif window is not None:
        raise ValueError(f"sliding_window must be None where no layer_types are {SLIDING!r}, got {window}.")


def readable_layers(config: DominoConfig, num_target_layers: int) -> range:
    """Layers that may be read of a target of so many: not the last one where no file told how many there are."""
    return range(num_target_layers - (config.num_target_layers is None))


def _check_target_layer_ids(config: DominoConfig) -> None:
    ids, num_layers = config.target_layer_ids, config.num_target_layers
    if ids is None and config.kind.may_ask_target:
        return
    allowed = readable_layers(config, MOST_LAYERS if num_layers is None else num_layers)
    is_list = isinstance(ids, (list, tuple)) and all(type(layer) is int for layer in ids)
    if not ids or not is_list or len(set(ids)) != len(ids) or not all(layer in allowed for layer in ids):
        last = "..." if num_layers is None else allowed.stop - 1
        raise ValueError(
            f"target_layer_ids must be unique and in [0, {last}] (num_target_layers={num_layers}; {WHY_READABLE}), "
            f"got {ids}."
        )
