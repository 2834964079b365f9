"""Gradient norms of backbone and correction head, apart, for the steps that are logged."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.compatibility import HEAD_MODULES


class GradientNorms(TrainerCallback):
    """Reads the norms in the steps that end with a line of the log, and in no others.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
    """

    def __init__(self, drafter: DominoDraftModel):
        self._drafter = drafter
        self._norms: dict[str, torch.Tensor] = {}  # on the device, after clipping

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read them, if there is a head to tell apart."""
        step = state.global_step + 1
        if self._drafter.has_correction_head and (
            step % state.logging_steps == 0 or (step == 1 and args.logging_first_step)
        ):
            self._norms = {"head_grad_norm": self._norm(of_head=True), "backbone_grad_norm": self._norm(of_head=False)}

    def take(self, grad_norm: float | None) -> dict[str, float]:
        """The norms of the step that is being logged, before clipping; nothing where they were not read.

        Args:
            grad_norm (`float`, *optional*): Of the whole drafter, before clipping.
        """
        norms = {name: float(norm) for name, norm in self._norms.items()}
        self._norms = {}
        whole = math.hypot(*norms.values())
        scale = grad_norm / whole if grad_norm and whole else 1.0
        return {name: norm * scale for name, norm in norms.items()}

    def _norm(self, of_head: bool) -> torch.Tensor:
        gradients = [
            parameter.grad
            for name, parameter in self._drafter.named_parameters()
            if parameter.grad is not None and (name.split(".")[0] in HEAD_MODULES) == of_head
        ]
        norm = torch.nn.utils.get_total_norm(gradients)
        # `fully_shard` gives every process a part of each gradient.
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
