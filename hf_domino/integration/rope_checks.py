"""The check of a call that comes near the length at which its target changes the rotary frequencies.

A block has other frequencies there than the same tokens one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino._common.refusal import refusal

# RoPE whose frequencies change with the length of the input, for a block at another point than for single tokens.
GROWING_ROPE_TYPES = ("dynamic", "longrope")


def num_given(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> int:
    """Positions that a call gives: of its embeddings, where there are any."""
    embeds = model_kwargs.get("inputs_embeds")
    return input_ids.shape[1] if embeds is None else embeds.shape[1]


def check_rope(
    target: PreTrainedModel,
    num_proposals: int,
    input_ids: torch.Tensor,
    model_kwargs: Mapping[str, Any],
    config: Any,
    max_length: int | None,
) -> None:
    """Refuse to come near the length at which a target changes its rotary frequencies: a block crosses it at once.

    Args:
        target (`PreTrainedModel`): The model that generates.
        num_proposals (`int`): Most of a round, which may reach behind the last token that is wanted.
        input_ids (`torch.Tensor` of shape `(batch, length)`): The prompt.
        model_kwargs (`Mapping`): What `generate` passes on: cache, mask, positions, `inputs_embeds`.
        config (`GenerationConfig`): The merged configuration of the call.
        max_length (`int`, *optional*): Tokens at which texts end, prompt included; None for no limit.

    Raises:
        ValueError: If any row may have positions on both sides; naming how many tokens may be generated.
    """
    text = target.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = parameters.get("rope_type")
        if kind not in GROWING_ROPE_TYPES:
            continue
        limit = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        shortest, longest = _prompt_lengths(input_ids, model_kwargs, config)
        cache = model_kwargs.get(CACHE)
        cached = 0 if cache is None else cache.get_seq_length()
        if kind == "longrope" and shortest > limit and not 0 < cached <= limit:
            continue
        room = limit - longest - num_proposals
        wanted = room + 1 if max_length is None else max_length - input_ids.shape[1]
        if wanted <= room:
            continue
        remedy = f"The target's {kind} rotary frequencies change at {limit} positions, and a block may reach past the "
        remedy += f"last token by {num_proposals}; " + (
            f"pass max_new_tokens={room}." if room > 0 else "drop assistant_model."
        )
        raise refusal("max_new_tokens behind this prompt", f"at most {max(room, 0)}", wanted, remedy)


def _prompt_lengths(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any], config: Any) -> tuple[int, int]:
    """Positions of the shortest and of the longest prompt of a batch, cached ones included and padding not."""
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    if positions is not None:
        ends = positions.reshape(-1, positions.shape[-1]).amax(dim=1) + 1
    elif mask is not None and mask.dim() == 2:
        ends = (mask != 0).sum(dim=1)
    else:
        return (max(num_given(input_ids, model_kwargs), getattr(config, "_mask_length", 0) or 0),) * 2
    return int(ends.min()), int(ends.max())
