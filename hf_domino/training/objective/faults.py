"""A loss that is not finite ends a training; on a GPU when a line is logged, so no step waits for it."""

from __future__ import annotations

from typing import Any

import torch

from hf_domino._common.refusal import refusal

REMEDY = (
    "Training stops here; checkpoints are from before. If that is the first step, load the target in a wider dtype "
    "(--target_dtype float32) and set --bf16 in place of --fp16; else lower learning_rate or muon_learning_rate, or "
    "warm up longer."
)


def check_losses(losses: list[tuple[int, torch.Tensor]], accelerator: Any) -> None:
    """Refuse the first of some losses, with their steps, that is not finite in any process."""
    broken = (~torch.isfinite(torch.stack([loss for _, loss in losses]))).float()
    for (step, loss), count in zip(losses, accelerator.reduce(broken, "sum").tolist(), strict=True):
        if count:
            raise refusal(f"the loss of step {step}", "finite", loss.item(), REMEDY)
