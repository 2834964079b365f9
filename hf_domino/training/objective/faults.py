"""Who is at fault for a loss that is not finite: what is read of the target is looked at first, the drafter is last.

It is asked only when it happened, and on a GPU when a line is logged, so a step neither costs more nor waits.

Shapes: B batch, S sequence length, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_domino._common.refusal import refusal
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.forward import TargetStates

FIRST_TOKENS = 8  # of a row, by which it is found in the text
POSITIONS = 64  # whose logits are made at once
WIDER = "Load it in a wider dtype than {dtype} (--target_dtype float32), and set --bf16 in place of --fp16"
DRAFTER = (
    "The drafter is at fault, as all that is read of the target is finite. Training stops here; checkpoints are from "
    "before. Lower learning_rate or muon_learning_rate, or warm up longer."
)


class LossWatch:
    """Keeps the losses of steps until they are looked at, and the text that each is of.

    Args:
        accelerator (`Accelerator`): Tells all processes of what one of them met.
        find_fault (`Callable`): Says who is at fault for the loss of a batch.
    """

    def __init__(self, accelerator: Any, find_fault: Callable[[dict[str, torch.Tensor]], str]):
        self._accelerator, self._find_fault = accelerator, find_fault
        self._seen: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]] = []

    def add(self, step: int, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Keep the loss of a step's micro-batch, and its text."""
        self._seen.append((step, loss.detach(), batch))

    def look(self) -> None:
        """Read the losses that were added; refuse the first that is not finite in any process."""
        if not self._seen:
            return
        seen, self._seen = self._seen, []
        broken = (~torch.isfinite(torch.stack([loss for _, loss, _ in seen]))).float()
        for (step, loss, batch), count in zip(seen, self._accelerator.reduce(broken, "sum").tolist(), strict=True):
            if count:
                raise refusal(f"the loss of step {step}", "finite", loss.item(), self._find_fault(batch))


@torch.no_grad()
def find_fault(target: TargetModel, read: TargetStates, batch: Mapping[str, torch.Tensor]) -> str:
    """Say who is at fault for the loss of a batch (`input_ids`, `attention_mask` `[B, S]`), and the way out."""
    wider = WIDER.format(dtype=str(target.model.dtype).removeprefix("torch."))
    rows = {
        f"hidden states of layer {name}": states for name, states in zip(target.layer_ids, read.captured, strict=True)
    }
    rows["embeddings"] = target.embed(batch["input_ids"])
    if read.final is not None:
        rows["final hidden states"] = read.final
    for name, values in rows.items():
        if (row := _first_broken(values)) is not None:
            return _blame_row(name, row, batch, wider)
    # Of zeros, lm_head makes NaN wherever a weight is NaN or infinite, whatever it is made of.
    if _first_broken(target.logits(torch.zeros_like(read.captured[0][0, :1]))) is not None:
        return f"The target is at fault: its lm_head is not finite. {wider}, or take another copy of its files."
    for row, states in enumerate(() if read.final is None else read.final):
        if any(_first_broken(target.logits(some)) is not None for some in states.split(POSITIONS)):
            return _blame_row("logits", row, batch, wider)
    return DRAFTER


def _first_broken(values: torch.Tensor) -> int | None:
    """The first row of values `[B, ...]` that holds NaN or an infinity; None where all are finite."""
    rows = (~torch.isfinite(values)).flatten(1).any(dim=1).nonzero()
    return int(rows[0]) if len(rows) else None


def _blame_row(name: str, row: int, batch: Mapping[str, torch.Tensor], remedy: str) -> str:
    tokens = batch["input_ids"][row][batch["attention_mask"][row].bool()][:FIRST_TOKENS].tolist()
    return (
        f"The target is at fault: its {name} are not finite in row {row} of the batch, which begins with the tokens "
        f"{', '.join(map(str, tokens))}. {remedy}, or leave that row out."
    )
