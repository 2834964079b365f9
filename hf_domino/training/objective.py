"""What one batch is trained on: its labels, what the target made of it, and the losses of the blocks drafted over it.

All that uses the drafter's weights is called from inside the wrapped model's forward, where data-parallel wrappers
have gathered them: `model(within=partial(objective.score, batch))`.

Shapes: B batch, S sequence length, N blocks per row, K block size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target import TargetModel
from hf_domino.training.anchors import block_labels
from hf_domino.training.arguments import DominoTrainingArguments, default_loss_decay
from hf_domino.training.forward import draft_blocks, read_target
from hf_domino.training.losses import DraftLosses, draft_losses

Batch = dict[str, torch.Tensor]


class ScoredBatch(NamedTuple):
    """What the drafter's blocks are worth on one batch.

    Args:
        losses (`DraftLosses`): Weighted sums.
        is_correct (`torch.Tensor`): `[B, N, K]` bool, whether the first choice is the label.
        is_base_correct (`torch.Tensor`): `[B, N, K]` bool, the same of the base logits, as in [`DraftLosses`].
        weights (`torch.Tensor`): `[B, N, K]` fp32, of the positions.
    """

    losses: DraftLosses
    is_correct: torch.Tensor
    is_base_correct: torch.Tensor
    weights: torch.Tensor


class Objective:
    """Scores batches with `anchors`; holds no weights of its own.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
        target (`TargetModel`): The frozen target.
        args (`DominoTrainingArguments`): For `loss_decay` and `max_logits_per_chunk`.
        autocast (`Callable`): Gives the context in which the forward runs.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        args: DominoTrainingArguments,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.drafter, self.target, self.args = drafter, target, args
        self.loss_decay = args.loss_decay or default_loss_decay(drafter.config.block_size)
        self._autocast = autocast

    def labels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels and weights of a batch's blocks, both `[B, N, K]`, as in [`~training.anchors.block_labels`]."""
        return block_labels(
            batch["input_ids"], batch["loss_mask"], batch["anchors"], self.drafter.config, self.loss_decay
        )

    def score(self, batch: Batch) -> ScoredBatch:
        """Draft and score the blocks of a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): `input_ids`, `loss_mask`, `attention_mask` `[B, S]`, `anchors` `[B, N]`.
        """
        drafter = self.drafter
        labels, weights = self.labels(batch)
        chosen = weights > 0
        with self._autocast():
            captured = read_target(self.target, batch["input_ids"])
            blocks = draft_blocks(
                drafter, self.target, batch["input_ids"], batch["attention_mask"], drafter.fuse_context(captured),
                batch["anchors"],
            )  # fmt: skip
            scored = blocks.select(chosen, labels, weights, drafter.config)
            losses = draft_losses(drafter, self.target, scored, self.args.max_logits_per_chunk)
        is_correct, is_base_correct = (
            torch.zeros_like(chosen).masked_scatter(chosen, hits)
            for hits in (losses.is_correct, losses.is_base_correct)
        )
        return ScoredBatch(losses, is_correct, is_base_correct, weights)
