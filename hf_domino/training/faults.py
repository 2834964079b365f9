"""End a training if losses or weights are not finite; on a GPU, losses are checked only when a line is logged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_domino._common.errors import invalid_argument

REMEDY = (
    "Training stops; checkpoints are from before. If this is the first step, load the target in a wider dtype "
    "(--target-dtype float32), and use --bf16 instead of --fp16. Otherwise lower learning_rate or muon_learning_rate, "
    "or warm up longer."
)


def check_losses(losses: list[tuple[int, torch.Tensor]], accelerator: Any) -> None:
    """Raise a `ValueError` for the first of some losses, given with their steps, that is not finite in some process."""
    broken = (~torch.isfinite(torch.stack([loss for _, loss in losses]))).float()
    for (step, loss), count in zip(losses, accelerator.reduce(broken, "sum").tolist(), strict=True):
        if count:
            raise invalid_argument(f"the loss of step {step}", "finite", loss.item(), REMEDY)


def check_weights(model: nn.Module, step: int) -> None:
    """Raise a `ValueError` if weights are not finite."""
    weights = dict(model.named_parameters())
    is_finite = torch.stack([weight.detach().isfinite().all() for weight in weights.values()]).tolist()
    names = [name for name, is_right in zip(weights, is_finite, strict=True) if not is_right]
    if names:
        remedy = "They are not saved. Continue from an earlier checkpoint with a lower learning rate."
        found = f"nan or inf in {', '.join(names[:3])} ({len(names)} tensors)"
        raise invalid_argument(f"the drafter's weights after step {step}", "finite", found, remedy)
