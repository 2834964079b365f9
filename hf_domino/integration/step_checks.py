"""Check that several decode steps in one forward give the same result as one step at a time.

They do not if a target passes outputs on from one step to the next, changes its rotary frequencies at some length of
the text, or runs under hooks that depend on the number of tokens in a forward or on the order of the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument
from hf_domino.decoding.stopping import KnownStops
from hf_domino.targets.view import GROWING_ROPE_TYPES, ropes_of

# The targets of these modules override the step, but only pass on values that are the same in all steps.
SAME_FOR_ALL_STEPS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("idefics", "paligemma"))


def check_steps(target: PreTrainedModel) -> None:
    """Raise an error for a target whose next decode step may need more from this one than its token."""
    update = type(target)._update_model_kwargs_for_generation
    if (
        update is not GenerationMixin._update_model_kwargs_for_generation
        and update.__module__ not in SAME_FOR_ALL_STEPS
    ):
        raise invalid_argument(
            f"{type(target).__name__}._update_model_kwargs_for_generation",
            "that of Transformers, or of Idefics or PaliGemma",
            "one of its own",
            "It may hand on outputs, and a round takes several steps in one forward; drop assistant_model.",
        )


def check_adapters(target: PreTrainedModel, batch_size: int) -> None:
    """Raise an error for adapters that PEFT applies by the length of a forward or by a sequence's place in the batch.

    PEFT passes `generate`'s arguments to its layers through forward hooks, once for the whole call. An activated LoRA
    (`alora_invocation_tokens`) counts from the end of a forward's input, which is a block here. `adapter_names` has an
    entry for each sequence, but sequences leave a batch when they end.

    Args:
        target (`PreTrainedModel`): The target, with the hooks of the call.
        batch_size (`int`): Number of sequences in the call.
    """
    for module in target.modules():
        for hook in module._forward_pre_hooks.values():
            given = getattr(hook, "keywords", {})
            if any(offset is not None for offset in given.get("alora_offsets") or ()):
                remedy = "PEFT applies it to the last tokens of each forward, and a round takes several at once; "
                remedy += "drop assistant_model, or disable the adapter."
                expected = "an adapter without alora_invocation_tokens"
                raise invalid_argument("the target's active adapter", expected, "an activated LoRA (aLoRA)", remedy)
            names = given.get("adapter_names")
            if batch_size > 1 and names is not None:
                remedy = "Sequences leave the batch when they end; generate those of one adapter at a time."
                raise invalid_argument(
                    "adapter_names with a Domino assistant_model", "None, for a batch", names, remedy
                )


def num_given(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> int:
    """Return the number of positions that a call passes in, as `inputs_embeds` if there are any, else as ids."""
    embeds = model_kwargs.get("inputs_embeds")
    if embeds is None:
        return input_ids.shape[1]
    return embeds.shape[1]


def check_rope(target: PreTrainedModel, num_proposals: int, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> None:
    """Raise an error if a block could cross the length at which a target changes its rotary frequencies."""
    text = target.config.get_text_config(decoder=True)
    max_length = KnownStops.among(kwargs["stopping_criteria"]).max_length
    for parameters in ropes_of(target):
        kind = parameters.get("rope_type")
        if kind not in GROWING_ROPE_TYPES:
            continue
        limit = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        shortest, longest = _prompt_lengths(input_ids, kwargs)
        cached = kwargs[CACHE].get_seq_length()
        if kind == "longrope" and shortest > limit and not 0 < cached <= limit:
            continue
        room = limit - longest - num_proposals
        if max_length is None:
            wanted = room + 1
        else:
            wanted = max_length - input_ids.shape[1]
        if wanted <= room:
            continue
        remedy = f"The target's {kind} rotary frequencies change at {limit} positions, and a block may reach past the "
        remedy += f"last token by {num_proposals}; " + (
            f"pass max_new_tokens={room}." if room > 0 else "drop assistant_model."
        )
        raise invalid_argument("max_new_tokens behind this prompt", f"at most {max(room, 0)}", wanted, remedy)


def _prompt_lengths(input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest prompt of a batch, with cached positions, without padding."""
    positions = kwargs.get("position_ids")
    mask = kwargs.get("attention_mask")
    if positions is not None:
        ends = positions.reshape(-1, positions.shape[-1]).amax(dim=1) + 1
    elif mask is not None and mask.dim() == 2:
        ends = (mask != 0).sum(dim=1)
    else:
        mask_length = getattr(kwargs["generation_config"], "_mask_length", 0) or 0
        return (max(num_given(input_ids, kwargs), mask_length),) * 2
    return int(ends.min()), int(ends.max())
