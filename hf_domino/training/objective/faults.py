"""Who is at fault for a loss that is not finite: what is read of the target is looked at first, the drafter is last.

It is asked only when it happened, and on a GPU when a line is logged, so a step neither costs more nor waits.

Shapes: B batch, S sequence length, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_domino._common.refusal import refusal
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.forward import read_target

FIRST_TOKENS = 8  # of a row, by which it is found in the text
POSITIONS = 64  # whose logits are made at once
WIDER = "Load it in a wider dtype than {dtype} (--target_dtype float32), and set --bf16 in place of --fp16"
DRAFTER = (
    "The drafter is at fault, as all that is read of the target is finite. Training stops here; checkpoints are from "
    "before. Lower learning_rate or muon_learning_rate, or warm up longer."
)


def check_losses(
    losses: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]], target: TargetModel, accelerator: Any, final: bool
) -> None:
    """Refuse the first of some losses, with their steps and texts, that is not finite in any process."""
    broken = (~torch.isfinite(torch.stack([loss for _, loss, _ in losses]))).float()
    for (step, loss, batch), count in zip(losses, accelerator.reduce(broken, "sum").tolist(), strict=True):
        if count:
            with accelerator.autocast():
                fault = find_fault(target, batch, final)
            raise refusal(f"the loss of step {step}", "finite", loss.item(), fault)


@torch.no_grad()
def find_fault(target: TargetModel, batch: Mapping[str, torch.Tensor], final: bool) -> str:
    """Say who is at fault for the loss of a batch (`input_ids`, `attention_mask` `[B, S]`), and the way out."""
    read = read_target(target, batch, final)
    wider = WIDER.format(dtype=str(target.model.dtype).removeprefix("torch."))
    # Of zeros, lm_head makes NaN wherever a weight is NaN or infinite, whatever it is made of.
    if not target.logits(torch.zeros_like(read.captured[0][0, :1])).isfinite().all():
        return f"The target is at fault: its lm_head is not finite. {wider}, or take another copy of its files."
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        layers = zip(target.layer_ids, read.captured, strict=True)
        found: dict[str, Any] = {f"hidden states of layer {index}": [states[row]] for index, states in layers}
        found["embeddings"] = [target.embed(ids)]
        if read.final is not None:
            found["final hidden states"] = [read.final[row]]
            found["logits"] = map(target.logits, read.final[row].split(POSITIONS))
        for name, values in found.items():
            if not all(some.isfinite().all() for some in values):
                tokens = ", ".join(map(str, ids[mask.bool()][:FIRST_TOKENS].tolist()))
                return (
                    f"The target is at fault: its {name} are not finite in row {row} of the batch, which begins with "
                    f"the tokens {tokens}. {wider}, or leave that row out."
                )
    return DRAFTER
