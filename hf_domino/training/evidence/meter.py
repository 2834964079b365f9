"""Running figures of training and evaluation, kept on the device until they are logged.

Shapes: B batch, N blocks per row, K block size.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_domino.training.objective.objective import ScoredBatch


def accepted_runs(is_correct: torch.Tensor, label_offset: int) -> torch.Tensor:
    """Proposals accepted in each block: the leading run of hits `[..., K]` from `label_offset` on, `[...]` int64."""
    return is_correct[..., label_offset:].long().cumprod(dim=-1).sum(dim=-1)


def complete_blocks(weights: torch.Tensor, label_offset: int) -> torch.Tensor:
    """Blocks whose proposals all count, by their weights `[B, N, K]`: `[B, N]` bool."""
    return (weights[..., label_offset:] > 0).all(dim=-1)


class TrainingMeter:
    """Sums of losses, weights and accepted tokens since the last reset.

    Args:
        label_offset (`int`): Block position of the first proposal.
        device (`torch.device`): Where the sums are kept.
    """

    def __init__(self, label_offset: int, device: torch.device):
        self.label_offset = label_offset
        self._sums = torch.zeros(5, device=device)

    def reset(self) -> None:
        """Forget everything."""
        self._sums.zero_()

    def add(self, scored: ScoredBatch, total: torch.Tensor | float = 1.0) -> None:
        """Add one micro-batch.

        Args:
            scored (`ScoredBatch`): What it is worth. Blocks whose proposals all count enter the acceptance length.
            total (`torch.Tensor` or `float`, *optional*, defaults to 1.0): Weights of the whole optimizer step, to
                average over steps; 1.0 to average over positions.
        """
        complete = complete_blocks(scored.weights, self.label_offset)
        lengths = accepted_runs(scored.is_correct, self.label_offset) + 1
        losses = scored.losses
        shares = torch.stack([losses.base.detach(), losses.corrected.detach(), scored.loss_weight]) / total
        self._sums += torch.cat((shares, torch.stack([(lengths * complete).sum(), complete.sum()])))

    def means(self, accelerator: Any) -> dict[str, float]:
        """Average over everything added, on all processes; every process must call.

        Args:
            accelerator (`Accelerator`): Sums over processes.

        Returns:
            `dict[str, float]`: `base_loss`, `corrected_loss`, and `acceptance_length` unless no block was complete.
        """
        base, corrected, weight, tokens, blocks = accelerator.reduce(self._sums.clone(), "sum").tolist()
        means = {"base_loss": base / max(weight, 1e-6), "corrected_loss": corrected / max(weight, 1e-6)}
        return means | ({"acceptance_length": tokens / blocks} if blocks else {})
