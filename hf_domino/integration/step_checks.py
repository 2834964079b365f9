"""Checks that several steps in one forward are what they are one by one.

A target may hand on outputs from one step to the next, or change its rotary frequencies at a length of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from hf_domino._common.cache_name import CACHE
from hf_domino._common.refusal import refusal

# Outputs of a target that are the same in all steps.
FOR_ALL_STEPS = ("image_outputs", "image_hidden_states")
# RoPE whose frequencies change with the length of the input, for a block at another point than for single tokens.
GROWING_ROPE_TYPES = ("dynamic", "longrope")


class _Noted(dict):
    """Stand for outputs before there are any, and note the names that are read of them."""

    def __init__(self):
        self.names: set[str] = set()

    def __getattr__(self, name: Any, default: Any = None) -> _Noted:
        self.names.add(str(name))
        return _Noted()

    __missing__ = get = __getattr__

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return ModelOutput

    def __call__(self, *args: Any, **kwargs: Any) -> _Noted:
        return _Noted()

    def __contains__(self, name: Any) -> bool:
        self.names.add(str(name))
        return True

    def __iter__(self) -> Iterator[str]:
        self.names.add("all of them")
        return iter(())

    keys = values = items = __iter__  # type: ignore[assignment]


def check_steps(target: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse a target whose next step needs more of this one than its token."""
    usual = GenerationMixin._update_model_kwargs_for_generation
    if type(target)._update_model_kwargs_for_generation is usual:
        return
    outputs, read_by_all = _Noted(), _Noted()
    usual(target, read_by_all, dict(model_kwargs))
    failed: list[str] = []
    try:
        target._update_model_kwargs_for_generation(
            outputs, dict(model_kwargs), is_encoder_decoder=False, num_new_tokens=1
        )
    except Exception as error:
        failed.append(f"an error ({error})")
    if found := sorted(outputs.names.difference(FOR_ALL_STEPS, read_by_all.names)) or failed:
        raise refusal(
            f"what {type(target).__name__}._update_model_kwargs_for_generation reads of outputs",
            f"nothing but {FOR_ALL_STEPS}",
            found,
            "A round takes several steps in one forward, and none has outputs of its own; drop assistant_model.",
        )


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
    """Refuse to come near the length at which a target changes its rotary frequencies: a block crosses it at once."""
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
