"""The target's side of a round: prefill, the verification forward, and rewinding its cache.

Shapes: B batch, T tokens so far, P proposals, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.target import TargetModel


class TargetRunner:
    """Runs the target through `generate`'s own input preparation and keeps its cache at the committed tokens.

    Args:
        target ([`TargetModel`]): View of the target.
        model_kwargs (`dict`): What `generate` prepared: cache, attention mask, positions and model-specific inputs.
    """

    def __init__(self, target: TargetModel, model_kwargs: dict[str, Any]):
        self.target = target
        self.model: PreTrainedModel = target.model
        self.kwargs = model_kwargs
        # A sliding-window layer forgets what it would need to step back, unless told beforehand.
        model_kwargs["past_key_values"].activate_past_recording()

    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Process the prompt `[B, T]`, less what the cache already holds.

        Returns:
            `tuple`: Logits `[B, 1, V]` of the next token, and the captured hidden states `[B, C, H]` of the positions
            that were processed, which are the last C.
        """
        cached = self.kwargs["past_key_values"].get_seq_length()
        new_length = input_ids.shape[1] - cached if cached else None
        return self._forward(input_ids, self.kwargs, new_length, logits_to_keep=1, is_first_iteration=True)

    def check_block(
        self, input_ids: torch.Tensor, proposed: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Verification forward over the anchor, which ends `input_ids`, and the proposals `[B, P]`.

        Returns:
            `tuple`: Logits `[B, P + 1, V]` and captured hidden states `[B, P + 1, H]`.
        """
        width = proposed.shape[1] + 1
        kwargs = self._advanced(copy.copy(self.kwargs), width - 1) if width > 1 else self.kwargs
        return self._forward(
            torch.cat((input_ids, proposed), dim=1), kwargs, width, logits_to_keep=width, is_first_iteration=False
        )

    def commit(self, num_new: int, num_checked: int = 0) -> None:
        """Extend masks and positions by the tokens just committed, and drop rejected positions from the cache.

        Args:
            num_new (`int`): Committed tokens; the last of them has not been through the target.
            num_checked (`int`, *optional*, defaults to 0): Positions of the last verification forward; 0 after prefill.
        """
        if num_checked:
            # Also when nothing is dropped: sliding-window layers shrink back to their window here.
            self.kwargs["past_key_values"].crop(-(num_checked - num_new))
        self.kwargs = self._advanced(self.kwargs, num_new)

    def _advanced(self, kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        return self.model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=num_tokens)

    def _forward(
        self,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        new_length: int | None,
        logits_to_keep: int,
        is_first_iteration: bool,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new_length, is_first_iteration=is_first_iteration, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        outputs = self.model(**(inputs | self.target.capture_kwargs()))
        logits = outputs.logits[:, -logits_to_keep:].to(input_ids.device)
        return logits, self.target.captured(outputs)
