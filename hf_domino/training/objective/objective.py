"""What one batch is trained on: its labels, what the target made of it, and the losses of the blocks drafted over it.

All that uses the drafter's weights is called from inside the wrapped model's forward, where data-parallel wrappers
have gathered them: `model(within=partial(objective.score, batch))`.

Shapes: B batch, S sequence length, N blocks per row, K block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.hidden_states.reading import states_of_batch
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.distillation import gather_final
from hf_domino.training.objective.faults import find_fault
from hf_domino.training.objective.forward import draft_blocks
from hf_domino.training.objective.losses import PUBLISHED, DraftLosses, LossOptions, ScoredBlocks
from hf_domino.training.objective.scoring import draft_losses

Batch = dict[str, torch.Tensor]
# Positions after which a loss weight has fallen to 1/e (arXiv 2605.29707, 2602.06036); of others a little under half.
LOSS_DECAY_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
MOST_LOGITS = 2**25  # that are held at once
POSITIONS_IN_CACHE = 256  # their logits stay in a CPU's caches, and still share one reading of lm_head


class ScoredBatch(NamedTuple):
    """What the drafter's blocks are worth on one batch.

    Args:
        losses (`DraftLosses`): Weighted sums.
        is_correct (`torch.Tensor`): `[B, N, K]` bool, whether the first choice is the label.
        is_base_correct (`torch.Tensor`): `[B, N, K]` bool, the same of the base logits, as in [`DraftLosses`].
        weights (`torch.Tensor`): `[B, N, K]` fp32, of the positions.
        has_loss (`torch.Tensor` or `bool`, *optional*): `[B, N, K]` bool, False where the label is not in the draft
            vocabulary: such a position carries no loss, and its proposal is a miss. Defaults to all.
    """

    losses: DraftLosses
    is_correct: torch.Tensor
    is_base_correct: torch.Tensor
    weights: torch.Tensor
    has_loss: torch.Tensor | bool = True

    @property
    def loss_weight(self) -> torch.Tensor:
        """What the losses are to be divided by: the weights of positions that carry one, summed up."""
        return (self.weights * self.has_loss).sum()


class Objective:
    """Scores batches with `anchors`; holds no weights of its own.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
        target (`TargetModel`): The frozen target.
        args (`DominoTrainingArguments`): For `loss_decay` and the loss options.
        autocast (`Callable`): Gives the context in which the forward runs.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        args: DominoTrainingArguments,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.drafter, self.target = drafter, target
        is_dynamic = args.position_weights == "dpace"
        self.options = LossOptions(args.distillation_weight, args.distillation_loss, is_dynamic)
        config = drafter.config
        published = LOSS_DECAY_BY_BLOCK_SIZE.get(config.block_size, round(0.45 * config.block_size, 2))
        self.loss_decay = args.loss_decay or config.kind.loss_decay or published
        self.gathers = not args.is_static
        self.max_logits = min(MOST_LOGITS, POSITIONS_IN_CACHE * config.draft_width) if self.gathers else MOST_LOGITS
        self._autocast = autocast

    def label(self, batch: Batch, evaluating: bool = False) -> torch.Tensor:
        """Add columns of the labels, -1 where they are not drafted, and weights to a batch, both `[B, N, K]`.

        As in [`~training.objective.anchors.block_labels`]; with D-PACE, weights do not fall along the block in
        training.

        Returns:
            `torch.Tensor`: The sum of the weights of labels that carry a loss: those of the draft vocabulary.
        """
        labels, batch["weights"] = block_labels(
            batch["input_ids"], batch["loss_mask"], batch["anchors"], self.drafter.config,
            math.inf if self.options.dpace and not evaluating else self.loss_decay, batch.get("position_ids"),
        )  # fmt: skip
        batch["columns"] = self.drafter.vocabulary.columns(labels)
        return (batch["weights"] * (batch["columns"] >= 0)).sum()

    def score(self, batch: Batch, lambda_base: float | None = None) -> ScoredBatch:
        """Draft and score the blocks of a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): `input_ids`, `loss_mask` `[B, S]`, `anchors` `[B, N]`, what
                [`~Objective.label`] adds, which is done here otherwise, `position_ids` `[B, S]` where rows are packed,
                and `hidden_states` `[B, S, C, H]` where the target is not to run.
            lambda_base (`float`, *optional*): Share of the base term in the loss. Without it, the batch is evaluated,
                by the published loss whatever is trained, so that trainings compare.
        """
        if "columns" not in batch:
            self.label(batch, evaluating=lambda_base is None)
        drafter, columns, weights = self.drafter, batch["columns"], batch["weights"]
        options = PUBLISHED if lambda_base is None else self.options
        with self._autocast():
            read = states_of_batch(self.target, batch, final=options.distillation_weight > 0)
            hidden, states = draft_blocks(
                drafter, self.target, batch["input_ids"], drafter.fuse_context(read.captured), batch["anchors"],
                batch.get("position_ids"),
            )  # fmt: skip
            final = None
            if read.final is not None:
                final = gather_final(
                    read.final, batch["anchors"], drafter.config.block_size, drafter.config.label_offset
                )
            of_blocks = (hidden, states, columns, weights, final)
            flat: list[Any] = [None if part is None else part.flatten(0, 1) for part in of_blocks]  # [B * N, ...]
            scored = ScoredBlocks(*flat)
            losses = draft_losses(
                drafter, self.target, scored, lambda_base or 0.0, self.max_logits, options, self.gathers
            )
        is_correct, is_base_correct = (hits.view_as(weights) for hits in (losses.is_correct, losses.is_base_correct))
        return ScoredBatch(losses, is_correct, is_base_correct, weights, columns >= 0)

    def find_fault(self, batch: Batch) -> str:
        """Say who is at fault for a loss that is not finite, as [`~training.objective.faults.find_fault`] does."""
        with self._autocast():
            return find_fault(self.target, batch, self.options.distillation_weight > 0)
