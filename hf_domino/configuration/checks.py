"""Validate the fields of a drafter's configuration; each error names the field, its range and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.from_target import ROPE_TYPES

ADAPTIVE = "adaptive"
DRAFT_LENGTHS = (ADAPTIVE, "full")
FULL = "full_attention"
SLIDING = "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)
MOST_DRAFTED = 1024  # tokens in a round; releases draft up to 16, trees up to 64, and masks grow with the square
MOST_POSITIONS = 2**31 - 1  # in a text, because kernels count positions in 32 bits
MOST = 10**15  # the product of two such numbers is still finite in fp32
MOST_LAYERS = 10**6  # of a target; also bounds layer ids if the number of layers is unknown
WHY_READABLE = "the last one's is read after the final norm, and only if num_target_layers is given"
MOST_WIDTH = 2**20  # of a tensor, except for vocabularies; products of three widths fit into 64 bits
WIDTH = (1, MOST_WIDTH)
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = {
    "vocab_size": (1, MOST_POSITIONS),
    "num_hidden_layers": (1, 1000),  # no decoder has that many
    **dict.fromkeys(WIDTHS, WIDTH),
    "max_position_embeddings": (1, MOST_POSITIONS),
    "block_size": (2, MOST_DRAFTED),
}
POSITIVE = (1e-30, MOST)  # positive numbers in fp32 begin at 1e-38
NUMBERS = {**dict.fromkeys(("initializer_range", "rms_norm_eps"), POSITIVE), "attention_dropout": (0, 1)}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FREQUENCIES = ("low_freq_factor", "high_freq_factor")
ROPE_NUMBERS = {
    "rope_theta": (2, MOST),
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow", *FREQUENCIES), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (0, MOST)),  # 0 means none
    "original_max_position_embeddings": (1, MOST_POSITIONS),
}
# Fields that each `rope_type` reads without a default.
ROPE_REQUIRED = {
    "linear": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "llama3": ("factor", "original_max_position_embeddings", *FREQUENCIES),
}


def check_fields(config: Any) -> None:
    """Raise an error if a field of a configuration is out of its range."""
    _check_method(config)
    _check_sizes(config)
    _check_choices(config)
    _check_numbers(config)
    _check_target_layer_ids(config)


def fields_of(config: Any, *names: str) -> str:
    """Describe fields of a method's configuration for an error message."""
    return f"{', '.join(names)} of {config.article} {config.title} drafter"


def _check_method(config: Any) -> None:
    """Raise an error for another method's name, and for shared fields without effect that have an unexpected value."""
    for name, value in config.fixed.items():
        if (given := getattr(config, name)) != value:
            remedy = "Leave it out; no other drafter of this method can be run."
            raise invalid_argument(fields_of(config, name), value, given, remedy)
    own = type(config).projector_type
    if config.projector_type != own:
        remedy = "Make a configuration of that method with config.changed(projector_type=...)."
        raise invalid_argument(fields_of(config, "projector_type"), repr(own), config.projector_type, remedy)


def check_range(field: str, value: Any, low: float, high: float | None = None, hint: str = "", is_whole=True) -> None:
    """Raise an error if a value is not a number (by default, a whole number) within its range."""
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        allowed = "a whole number" if is_whole else "a number"
    elif low <= value <= (math.inf if high is None else high):
        return
    else:
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
    raise ValueError(f"{field} must be {allowed}{f' ({hint})' if hint else ''}, got {value!r}.")


def _check_sizes(config: Any) -> None:
    for field, allowed in config.ranges.items():
        check_range(field, getattr(config, field), *allowed)
    if config.num_target_layers is not None:
        check_range("num_target_layers", config.num_target_layers, 1, MOST_LAYERS, "or None")
    if config.draft_pool_size is not None:
        check_range("draft_pool_size", config.draft_pool_size, 1)
    if config.draft_window_size is not None:
        check_range("draft_window_size", config.draft_window_size, 1, MOST_POSITIONS, "or None")
    if (nodes := config.draft_tree_size) not in (None, ADAPTIVE):
        check_range("draft_tree_size", nodes, 1, MOST_DRAFTED, f"or {ADAPTIVE!r}, or None")
    tokens = f"vocab_size={config.vocab_size}"
    drafted = f"num_draft_tokens={config.num_draft_tokens}"
    if config.draft_vocab_size is not None:
        check_range("draft_vocab_size", config.draft_vocab_size, 1, config.vocab_size, tokens)
    check_range("mask_token_id", config.mask_token_id, 0, config.vocab_size - 1, tokens)
    check_range("pure_draft_prefix_len", config.pure_draft_prefix_len, 0, config.num_draft_tokens - 1, drafted)
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {config.head_dim}.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads={config.num_key_value_heads}, "
            f"got {config.num_attention_heads}."
        )


def _check_numbers(config: Any) -> None:
    """Raise an error if a field other than a size is text, NaN or infinite, or is zero but must be positive."""
    for field, limits in NUMBERS.items():
        check_range(field, getattr(config, field), *limits, is_whole=False)
    for field in TOKEN_IDS:
        ids = getattr(config, field)
        for token in ids if isinstance(ids, (list, tuple)) else [ids]:
            if token is not None:
                check_range(field, token, -1, MOST_POSITIONS)  # some targets use -1 for none
    rope = config.rope_parameters or {}
    partial = rope.get("partial_rotary_factor", 1)
    check_range("rope_parameters['partial_rotary_factor']", partial, 1, 1, is_whole=False)
    check_rope_numbers(rope, required=("rope_theta", *ROPE_REQUIRED.get(rope.get("rope_type", "default"), ())))


def check_rope_numbers(rope: Mapping[str, Any], section: str = "rope_parameters", required: Sequence[str] = ()) -> None:
    """Raise an error if a rotary embedding has a number out of its range, or differs by layer.

    Args:
        rope (`Mapping[str, Any]`): The parameters of the rotary embedding, as in a configuration.
        section (`str`, *optional*, defaults to `"rope_parameters"`): Their name in the configuration, for the error.
        required (`Sequence[str]`, *optional*, defaults to `()`): Fields that must not be None.

    Raises:
        ValueError: If a number is out of its range, or the parameters differ by layer; the message names the field, its
            range and its value.
    """
    for field, limits in ROPE_NUMBERS.items():
        value = rope.get(field)
        if value is not None or field in required:
            check_range(f"{section}[{field!r}]", value, *limits, is_whole=False)
    for field, value in rope.items():
        if isinstance(value, dict):
            raise invalid_argument(f"{section}[{field!r}]", "absent", value, "All layers share one rotary embedding.")
    low, high = (rope.get(field) for field in FREQUENCIES)
    if low is not None and high is not None and low >= high:
        expected = f"more than low_freq_factor={low}"
        raise invalid_argument(f"{section}['high_freq_factor']", expected, high, "Correct config.json.")


def _check_choices(config: Any) -> None:
    check_choice(config, "draft_length", DRAFT_LENGTHS)
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_parameters['rope_type'] must be one of {ROPE_TYPES}, got {rope_type!r}.")


def check_choice(config: Any, field: str, allowed: Sequence[str]) -> None:
    """Raise an error if a field does not have one of the allowed values."""
    if getattr(config, field) not in allowed:
        raise ValueError(f"{field} must be one of {tuple(allowed)}, got {getattr(config, field)!r}.")


def readable_layers(config: Any, num_target_layers: int) -> range:
    """Return the target layers that a drafter may read: not the last one if `config.num_target_layers` is None."""
    return range(num_target_layers - (config.num_target_layers is None))


def _check_target_layer_ids(config: Any) -> None:
    ids = config.target_layer_ids
    num_layers = config.num_target_layers
    if ids is None and not config.needs_layer_ids:
        return
    allowed = readable_layers(config, MOST_LAYERS if num_layers is None else num_layers)
    is_list = isinstance(ids, (list, tuple)) and all(type(layer) is int for layer in ids)
    if not ids or not is_list or len(set(ids)) != len(ids) or not all(layer in allowed for layer in ids):
        last = "..." if num_layers is None else allowed.stop - 1
        raise ValueError(
            f"target_layer_ids must be unique and in [0, {last}] (num_target_layers={num_layers}; {WHY_READABLE}), "
            f"got {ids}."
        )
