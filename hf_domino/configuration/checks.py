"""What the fields of a drafter's configuration must be, told by name where one is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from hf_domino.configuration.from_target import ROPE_TYPES
from hf_domino.configuration.kinds import KINDS, MOST_LAYERS

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

logger = logging.get_logger(__name__)

PROJECTOR_TYPES = tuple(KINDS)
ACCEPTANCE_RULES = ("coupled", "residual")
DRAFT_LAWS = ("sampled", "greedy")
ADAPTIVE = "adaptive"
DRAFT_LENGTHS = (ADAPTIVE, "full")
FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = (FULL, SLIDING)


def check_fields(config: DominoConfig) -> None:
    """Check all fields.

    Args:
        config ([`DominoConfig`]): The configuration.

    Raises:
        ValueError: If a field is out of its range.
    """
    _check_sizes(config)
    _check_choices(config)
    _check_windows(config)
    _check_target_layer_ids(config)
    config.kind.check(config)


def _check_range(config: DominoConfig, field: str, low: int, high: int | None = None, hint: str = "") -> None:
    value = getattr(config, field)
    hint = f" ({hint})" if hint else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} must be a whole number{hint}, got {value!r}.")
    if value < low or (high is not None and value > high):
        allowed = f"in [{low}, {high}]" if high is not None else f"at least {low}"
        raise ValueError(f"{field} must be {allowed}{hint}, got {value}.")


def _check_positive(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{field} must be a number above 0, got {value!r}.")


def _check_sizes(config: DominoConfig) -> None:
    sizes = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    )
    for field in (*sizes.split(), "max_position_embeddings", "emb_dim", "gru_hidden_dim"):
        _check_range(config, field, 1)
    _check_range(config, "block_size", 2)
    for field, low in (("ngram_size", 3), ("window_size", 1), ("num_candidates", 1)):
        _check_range(config, field, low)
    for field in ("draft_pool_size", "target_tokenizer_size"):
        if getattr(config, field) is not None:
            _check_range(config, field, 1)
    if config.draft_tree_size not in (None, ADAPTIVE):
        _check_range(config, "draft_tree_size", 1, hint=f"or {ADAPTIVE!r}, or None")
    if config.draft_vocab_size is not None:
        _check_range(config, "draft_vocab_size", 1, config.vocab_size, f"vocab_size={config.vocab_size}")
    _check_range(config, "mask_token_id", 0, config.vocab_size - 1, f"vocab_size={config.vocab_size}")
    _check_range(
        config, "pure_draft_prefix_len", 0, config.num_draft_tokens - 1, f"num_draft_tokens={config.num_draft_tokens}"
    )
    _check_positive("rms_norm_eps", config.rms_norm_eps)
    _check_positive("rope_parameters['rope_theta']", (config.rope_parameters or {}).get("rope_theta"))
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even for rotary embeddings, got {config.head_dim}.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads must be a multiple of num_key_value_heads={config.num_key_value_heads}, "
            f"got {config.num_attention_heads}."
        )


def _check_choices(config: DominoConfig) -> None:
    if config.projector_type not in PROJECTOR_TYPES:
        raise ValueError(f"projector_type must be one of {PROJECTOR_TYPES}, got {config.projector_type!r}.")
    if config.acceptance_rule not in ACCEPTANCE_RULES:
        raise ValueError(f"acceptance_rule must be one of {ACCEPTANCE_RULES}, got {config.acceptance_rule!r}.")
    if config.draft_law not in DRAFT_LAWS:
        raise ValueError(f"draft_law must be one of {DRAFT_LAWS}, got {config.draft_law!r}.")
    if config.draft_law != "sampled" and config.acceptance_rule != "residual":
        logger.warning_once(
            "draft_law=%r is for acceptance_rule='residual' and ignored under %r.",
            config.draft_law,
            config.acceptance_rule,
        )
    if config.draft_length not in DRAFT_LENGTHS:
        raise ValueError(f"draft_length must be one of {DRAFT_LENGTHS}, got {config.draft_length!r}.")
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
    if config.has_sliding_layers and (window is None or window < config.block_size):
        raise ValueError(
            f"sliding_window must be at least {config.block_size} (block_size) where layer_types has {SLIDING!r}, "
            f"got {window}."
        )
    if window is not None and not config.has_sliding_layers:
        raise ValueError(f"sliding_window must be None where no layer_types are {SLIDING!r}, got {window}.")


def _check_target_layer_ids(config: DominoConfig) -> None:
    ids, num_layers = config.target_layer_ids, config.num_target_layers
    if ids is None and config.kind.may_ask_target:
        return
    allowed = config.kind.readable(num_layers)
    if not ids or len(set(ids)) != len(ids) or not all(layer in allowed for layer in ids):
        first, last = ("..." if layer + 1 >= MOST_LAYERS - 1 else layer for layer in (allowed.start, allowed.stop - 1))
        raise ValueError(
            f"target_layer_ids must be unique and in [{first}, {last}] (num_target_layers={num_layers}; "
            f"{config.kind.why_readable}), got {ids}."
        )
