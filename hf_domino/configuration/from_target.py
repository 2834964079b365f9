"""Derive a drafter's configuration from its target's, even if the target's leaves fields out."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice

# RoPE variants whose frequencies do not change with the length of the input.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# Names under which files say whether the rotary embedding rotates neighbours as a pair, each with its value if it does.
ROTARY = {
    **dict.fromkeys(("rope_interleaved", "rope_interleave", "rotary_interleaved", "rope_traditional"), True),
    **dict.fromkeys(("rope_is_neox_style", "is_neox_style"), False),
}
DEFAULT_ROPE_THETA = 10_000.0
# Patterns of added tokens that no text holds: reserved ones, as in Llama 3, Mistral and Gemma, then the unknown token.
RESERVED = (r"(reserved|unused|control|place.?holder|dummy|extra|special)\D*\d", r"\bunk\b")
# Fields in which targets say how many positions they have.
LENGTH_LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")
SHORTER = "Choose a shorter one (--max-new-tokens)."


def _read(text: PreTrainedConfig, field: str) -> Any:
    """Read a field of a target's configuration: the first layer's if layers differ, None if it is missing."""
    try:
        return getattr(text, field, None)
    except RuntimeError:  # Transformers raises it for fields that differ by layer
        return getattr(text.per_layer_config[0], field, None)


def _size(text: PreTrainedConfig, field: str) -> int:
    if not isinstance(size := _read(text, field), int):
        raise ValueError(
            f"target_config.{field} must be an integer, got {size!r} ({text.model_type}): a Domino drafter reads a "
            "decoder of one width. Pass the configuration of such a part."
        )
    return size


def _positive(text: PreTrainedConfig, *fields: str) -> Any:
    """Return the first of these fields that is a positive number, or None."""
    values = (_read(text, field) for field in fields)
    return next((value for value in values if isinstance(value, (int, float)) and value > 0), None)


def within_window(target_config: PreTrainedConfig, max_length: int, answer: int = 0) -> int:
    """Limit `max_length` to the positions that a target has, and log a notice if they are fewer.

    Args:
        target_config (`PreTrainedConfig`): The target's configuration.
        max_length (`int`): Requested length of the longest example, in tokens.
        answer (`int`, *optional*, defaults to 0): Number of these tokens that the target writes.

    Raises:
        ValueError: If answers leave no room for a prompt.
    """
    window = _positive(target_config.get_text_config(decoder=True), *LENGTH_LIMITS) or max_length
    if window <= answer:
        raise invalid_argument("max_new_tokens", f"below {window}, because the target reads no more", answer, SHORTER)
    if window < max_length:
        notice(f"examples are cut at {window} tokens, because the target reads no more.")
    return min(window, max_length)


def spread_layers(num_target_layers: int, most: int) -> list[int]:
    """Choose layers that are spread over a target, as the DFlash releases do (arXiv 2602.06036).

    The last layer is never chosen, because Transformers returns its hidden state after the final norm. If the releases'
    rule would repeat a layer or leave the range, as in small targets, fewer layers are chosen.

    Args:
        num_target_layers (`int`): Number of layers of the target.
        most (`int`): Maximum number of layers to choose.
    """
    if num_target_layers < 2:
        raise ValueError(
            f"num_target_layers must be at least 2, got {num_target_layers}: a drafter reads inner layers."
        )
    for count in range(most, 1, -1):
        ids = [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
        if ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= num_target_layers - 2:
            return ids
    return [min(num_target_layers // 2, num_target_layers - 2)]


def rank_for(hidden_size: int) -> int:
    """Return the rank of a new correction head for a target of this hidden size."""
    return max(16, min(256, hidden_size // 4))


def eos_ids_of(config: Any) -> tuple[int, ...]:
    """Return the token ids that end a text, from a model or generation configuration; empty if it names none."""
    ends = config.eos_token_id
    if ends is None:
        return ()
    if isinstance(ends, (list, tuple)):
        return tuple(ends)
    return (int(ends),)


def fields_from_target(text: PreTrainedConfig, tokenizer: Any = None) -> dict[str, Any]:
    """Derive the shared fields of a drafter's configuration that follow the target.

    Args:
        text (`PreTrainedConfig`): The configuration of the target's decoder.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer, to find a mask token.

    Raises:
        ValueError: If the target has no width, vocabulary or number of layers.
    """
    hidden_size = _size(text, "hidden_size")
    num_layers = _size(text, "num_hidden_layers")
    intermediate_size = _read(text, "intermediate_size")
    return (
        _head_fields(text)
        | _token_ids(text, tokenizer)
        | {
            "vocab_size": _size(text, "vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size if isinstance(intermediate_size, int) else 3 * hidden_size,
            "num_hidden_layers": max(1, min(5, num_layers // 4)),
            "max_position_embeddings": _positive(text, *LENGTH_LIMITS) or 40960,
            "rms_norm_eps": _positive(text, "rms_norm_eps") or 1e-6,
            "rope_parameters": _rope_parameters(text),
            "num_target_layers": num_layers,
            "target_model_type": text.model_type,
        }
    )


def _head_fields(text: PreTrainedConfig) -> dict[str, int]:
    """Return the target's heads, or plain heads of width 64 if it has no ordinary attention heads."""
    hidden_size = _size(text, "hidden_size")
    num_heads = _read(text, "num_attention_heads") or 1
    head_dim = _read(text, "head_dim") or hidden_size // num_heads
    num_key_value_heads = _read(text, "num_key_value_heads") or num_heads
    ordinary = isinstance(num_heads, int) and isinstance(num_key_value_heads, int) and isinstance(head_dim, int)
    if not ordinary or head_dim % 2 or num_heads % num_key_value_heads:
        num_heads = num_key_value_heads = max(1, hidden_size // 64)
        head_dim = 64
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_key_value_heads, "head_dim": head_dim}


def _rope_parameters(text: PreTrainedConfig) -> dict[str, Any]:
    """Return the target's RoPE if its frequencies are fixed, else only its base."""
    rope = _read(text, "rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if not isinstance(rope, dict) or rope.get("rope_type", "default") not in ROPE_TYPES:
        rope = {"rope_theta": rope.get("rope_theta") if isinstance(rope, dict) else None}
    others = ("partial_rotary_factor", *ROTARY)
    # Some targets nest the rotary embedding of another type of layer in that of the first.
    is_kept = {
        key: key not in others and value is not None and not isinstance(value, dict) for key, value in rope.items()
    }
    kept = {key: value for key, value in rope.items() if is_kept[key]}
    return {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA} | kept


def _token_ids(text: PreTrainedConfig, tokenizer: Any) -> dict[str, Any]:
    bos, eos, pad = (_read(text, f"{name}_token_id") for name in ("bos", "eos", "pad"))
    first_eos = eos[0] if isinstance(eos, (list, tuple)) else eos
    spare = max(getattr(tokenizer, "get_vocab", dict)().values(), default=text.vocab_size - 1) + 1
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    template = str(getattr(tokenizer, "chat_template", None))
    kept = (added[name] for use in RESERVED for name in added if re.search(use, name, re.I) and name not in template)
    # The defaults of some configurations name tokens that are not in their own vocabulary.
    candidates = (getattr(tokenizer, "mask_token_id", None), spare, *kept, pad, first_eos, text.vocab_size - 1)
    return {
        "mask_token_id": next(token for token in candidates if token is not None and 0 <= token < text.vocab_size),
        "bos_token_id": bos,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": pad,
    }
