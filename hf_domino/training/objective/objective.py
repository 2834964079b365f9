"""What one batch is trained on: its labels, what the target made of it, and the losses of the blocks drafted over it.

All that uses the drafter's weights is called from inside the wrapped model's forward, where data-parallel wrappers
have gathered them: `model(within=partial(objective.score, batch))`.

Shapes: B batch, S sequence length, N blocks per row, K block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.view import block_positions, gather_positions
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments, default_loss_decay
from hf_domino.training.hidden_states.reading import states_of_batch
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.distillation import check_final, gather_final
from hf_domino.training.objective.faults import find_fault
from hf_domino.training.objective.forward import DraftedBlocks, TargetStates, draft_blocks, prefix_states
from hf_domino.training.objective.losses import PUBLISHED, DraftLosses, ScoredBlocks
from hf_domino.training.objective.own_prefixes import write_own_prefixes
from hf_domino.training.objective.scoring import draft_losses

Batch = dict[str, torch.Tensor]


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
        args (`DominoTrainingArguments`): For `loss_decay`, `max_logits_per_chunk` and the loss options.
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
        config = drafter.config
        self.loss_decay = args.loss_decay or config.kind.loss_decay or default_loss_decay(config.block_size)
        self.options = args.loss_options()
        self.max_logits = args.logits_per_chunk(config.draft_width)
        self._autocast = autocast
        self.gathers = not args.is_static
        self._final_is_known = False

    def labels(self, batch: Batch, evaluating: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the labels, -1 where they are not drafted, and weights of a batch's blocks, both `[B, N, K]`.

        As in [`~training.objective.anchors.block_labels`]; with D-PACE, weights do not fall along the block.
        """
        dynamic = self.options.dpace_alpha is not None and not evaluating
        decay = math.inf if dynamic else self.loss_decay
        labels, weights = block_labels(
            batch["input_ids"], batch["loss_mask"], batch["anchors"], self.drafter.config, decay,
            batch.get("position_ids"),
        )  # fmt: skip
        return self.drafter.vocabulary.columns(labels), weights

    def label(self, batch: Batch) -> torch.Tensor:
        """Add columns of labels and weights to a training batch.

        Returns:
            `torch.Tensor`: The sum of the weights of labels that carry a loss: those of the draft vocabulary.
        """
        batch["columns"], batch["weights"] = self.labels(batch)
        return (batch["weights"] * (batch["columns"] >= 0)).sum()

    def score(self, batch: Batch, lambda_base: float | None = None) -> ScoredBatch:
        """Draft and score the blocks of a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): `input_ids`, `loss_mask` `[B, S]`, `anchors` `[B, N]`, and
                `position_ids` `[B, S]` where rows are packed, `hidden_states` `[B, S, C, H]` where the target is not
                to run, and what [`~Objective.label`] adds, if it was asked.
            lambda_base (`float`, *optional*): Share of the base term in the loss. Without it, the batch is evaluated,
                by the published loss whatever is trained, so that trainings compare.
        """
        drafter, evaluating = self.drafter, lambda_base is None
        options = PUBLISHED if evaluating else self.options
        is_labelled = not evaluating and "columns" in batch
        columns, weights = (batch["columns"], batch["weights"]) if is_labelled else self.labels(batch, evaluating)
        with self._autocast():
            read = states_of_batch(self.target, batch, final=options.distillation is not None)
            blocks = draft_blocks(
                drafter, self.target, batch["input_ids"], drafter.fuse_context(read.captured), batch["anchors"],
                batch.get("position_ids"),
            )  # fmt: skip
            if "own_prefixes" in batch and blocks.states is not None:
                blocks = replace(blocks, states=self._own_states(blocks, batch))
            final = None if read.final is None else self._final_of(read, batch["anchors"])
            scored = ScoredBlocks(  # [B * N, ...]
                blocks.hidden.flatten(0, 1), None if blocks.states is None else blocks.states.flatten(0, 1),
                columns.flatten(0, 1), weights.flatten(0, 1), None if final is None else final.flatten(0, 1),
            )  # fmt: skip
            losses = draft_losses(
                drafter, self.target, scored, lambda_base or 0.0, self.max_logits, options, self.gathers
            )
        is_correct, is_base_correct = (hits.view_as(weights) for hits in (losses.is_correct, losses.is_base_correct))
        return ScoredBatch(losses, is_correct, is_base_correct, weights, columns >= 0)

    def find_fault(self, batch: Batch) -> str:
        """Say who is at fault for a loss that is not finite, as [`~training.objective.faults.find_fault`] does."""
        with self._autocast(), torch.no_grad():
            read = states_of_batch(self.target, batch, final=self.options.distillation is not None)
            return find_fault(self.target, read, batch, self.drafter.config.mask_token_id, self.max_logits)

    def _own_states(self, blocks: DraftedBlocks, batch: Batch) -> torch.Tensor:
        """Prefix states `[B, N, K, G]` with the drafter's own tokens where `own_prefixes` `[B, N]` says so."""
        tokens = gather_positions(batch["input_ids"], block_positions(batch["anchors"], blocks.hidden.shape[2]))
        tokens = write_own_prefixes(
            self.drafter, self.target, blocks.hidden, tokens, batch["own_prefixes"], self.max_logits, self.gathers
        )
        return prefix_states(self.drafter, self.target, tokens)

    def _final_of(self, read: TargetStates, anchors: torch.Tensor) -> torch.Tensor:
        """What the target predicts the labels from `[B, N, K, H]`; the first batch is checked."""
        assert read.final is not None
        if not self._final_is_known and read.logits is not None:
            check_final(self.target, read.final, read.logits)
            self._final_is_known = True
        return gather_final(read.final, anchors, self.drafter.config.block_size, self.drafter.config.label_offset)
