"""Running metrics of training and evaluation, kept on the device until they are logged.

Acceptance is teacher-forced here, over the anchors of the losses.

Shapes: B batch, N blocks per sequence, K block size, P proposals.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.training.losses.eager import DraftLosses
from hf_domino.training.objective.forward import Batch


def accepted_runs(is_correct: torch.Tensor, label_offset: int) -> torch.Tensor:
    """Count the accepted proposals of each block, `[...]` int64: the leading hits `[..., K]` from `label_offset` on."""
    return is_correct[..., label_offset:].long().cumprod(dim=-1).sum(dim=-1)


class Meter:
    """Sums losses and weights, and counts the correct proposals of blocks in which every label counts."""

    def __init__(self, config: DominoConfig, device: torch.device):
        self._label_offset = config.label_offset
        self._has_head = bool(config.head_layers)
        self._sums = torch.zeros(3, device=device)
        self._places = torch.arange(config.num_draft_tokens + 1, device=device)
        # Blocks with at least 0, 1, ..., P accepted proposals, by base and by corrected logits.
        self._survivors = torch.zeros(2, config.num_draft_tokens + 1, device=device, dtype=torch.int64)

    def add(self, losses: DraftLosses, batch: Batch, total: torch.Tensor | float = 1.0) -> None:
        """Add one micro-batch.

        `total` is the sum of the weights of its whole step for an average over steps, or 1 for one over positions.
        """
        self._sums += torch.stack([losses.base, losses.corrected, batch["loss_weight"]]) / total
        hits = torch.stack((losses.is_base_correct, losses.is_correct))  # [2, B * N, K]
        runs = accepted_runs(hits, self._label_offset)[..., None]
        counted = batch["weights"].flatten(0, 1)[:, self._label_offset :] > 0
        self._survivors += ((runs >= self._places) & counted.all(dim=-1, keepdim=True)).sum(dim=1)

    def means(self, accelerator: Any, by_position: bool = False) -> dict[str, float]:
        """Average over everything that all processes have added; every process must call it.

        Returns `base_loss` and `corrected_loss`, and `acceptance_length` unless no block was complete. With
        `by_position`, it also returns `accept_at_1` to `accept_at_P`, the share of correct proposals among those whose
        predecessors are all correct, and with a correction head the same metrics of the base logits, which start with
        `base_`.
        """
        base_loss, corrected_loss, weight = accelerator.reduce(self._sums.clone(), "sum").tolist()
        base, corrected = accelerator.reduce(self._survivors.clone(), "sum").tolist()
        weight = max(weight, 1e-6)
        means = {"base_loss": base_loss / weight, "corrected_loss": corrected_loss / weight}
        for prefix, survivors in (("", corrected), ("base_", base))[: 1 + (by_position and self._has_head)]:
            if survivors[0]:
                means[f"{prefix}acceptance_length"] = sum(survivors) / survivors[0]
            for place, (before, after) in enumerate(pairwise(survivors if by_position else ()), start=1):
                if before:
                    means[f"{prefix}accept_at_{place}"] = after / before
        return means
