"""Get the inputs that `generate` prepares for its decoding loop, for code that replaces the loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

# Arguments of `generate` for a single greedy output, whatever the target's own configuration says.
GREEDY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}


def prepared(target: PreTrainedModel, input_ids: torch.Tensor, max_new_tokens: int, **given: Any) -> tuple[Any, ...]:
    """Return the model and token ids of a greedy call, its processors, criteria and configuration, and other inputs."""
    found: list[tuple[Any, ...]] = []

    def look(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        found.append((model, input_ids, (logits_processor, stopping_criteria, generation_config), model_kwargs))
        return input_ids

    fixed = GREEDY | {"use_cache": True, "attention_mask": torch.ones_like(input_ids)}
    # This works with and without our patch of `generate`, even if a drafter is attached to the target.
    target.generate(input_ids, custom_generate=look, **(given | fixed), max_new_tokens=max_new_tokens)
    return found[0]
