"""The training objective of one batch: its labels, the target's hidden states, and the losses of the drafted blocks.

In training, everything that uses the drafter's weights is called inside the forward of the wrapped model, because
data-parallel wrappers only follow what happens there: `model(within=partial(objective.score, batch))`.

Shapes: B batch, S sequence length, N blocks per sequence, K block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hf_domino.methods import DominoDraftModel
from hf_domino.methods.side_by_side import block_positions
from hf_domino.targets.view import TargetModel
from hf_domino.training.fields import TrainingFields
from hf_domino.training.losses.chunked import domino_loss
from hf_domino.training.losses.eager import DraftLosses
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.forward import Batch, draft_blocks, lazy_logits, read_target

# Positions after which a loss weight has fallen to 1/e (arXiv 2605.29707, 2602.06036). Other block sizes get a little
# under half their size.
LOSS_DECAY_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
MOST_LOGITS = 2**25  # that are in memory at once
# Few enough that their logits stay in a CPU's caches, and enough to share one read of lm_head's weights.
POSITIONS_IN_CACHE = 256


class Objective:
    """Scores batches with `anchors`; it has no weights of its own.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper around it.
        target (`TargetModel`): The frozen target.
        args (`TrainingFields`): Arguments, of which `loss_decay` and the loss options are read.
        autocast (`Callable`): Returns the autocast context in which the forward runs.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        args: TrainingFields,
        autocast: Callable[[], AbstractContextManager],
    ):
        self.drafter = drafter
        self.target = target
        self.args = args
        config = drafter.config
        published = LOSS_DECAY_BY_BLOCK_SIZE.get(config.block_size, round(0.45 * config.block_size, 2))
        self.loss_decay = args.loss_decay or config.loss_decay or published
        self.gathers = not args.is_static
        self.max_logits = MOST_LOGITS
        if self.gathers:
            self.max_logits = min(MOST_LOGITS, POSITIONS_IN_CACHE * config.draft_width)
        self._autocast = autocast

    def label(self, batch: Batch, evaluating: bool = False) -> None:
        """Add the labels to a batch: `columns` and `weights`, both `[B, N, K]`, and the scalar `loss_weight`.

        Labels and weights come from [`~training.objective.anchors.block_labels`]; with D-PACE, training weights do not
        fall along the block. A column is -1 if the draft vocabulary lacks the label. `loss_weight` is the sum of the
        weights of all other labels, by which the losses are divided later.
        """
        is_dynamic = self.args.position_weights == "dpace" and not evaluating
        decay = math.inf if is_dynamic else self.loss_decay
        labels, batch["weights"] = block_labels(batch, self.drafter.config, decay)
        batch["columns"] = self.drafter.vocabulary.columns(labels)
        batch["loss_weight"] = (batch["weights"] * (batch["columns"] >= 0)).sum()

    def score(self, batch: Batch, lambda_base: float | None = None) -> DraftLosses:
        """Draft and score the B * N blocks of a batch.

        Args:
            batch (`dict[str, torch.Tensor]`): `input_ids` and `loss_mask` `[B, S]`, `anchors` `[B, N]`, and optionally
                `hidden_states` `[B, S, C, H]`, with which the target does not run. If the columns of
                [`~Objective.label`] are missing, they are added.
            lambda_base (`float`, *optional*): Share of the base term in the loss. Without it, the batch is evaluated
                with the published loss, never with distillation or D-PACE, so that different trainings can be compared.
        """
        if "columns" not in batch:
            self.label(batch, evaluating=lambda_base is None)
        drafter = self.drafter
        anchors = batch["anchors"]
        config = drafter.config
        learns = lambda_base is not None and self.args.distillation_weight > 0
        with self._autocast():
            captured, final = read_target(self.target, batch, final=learns)
            hidden, states = draft_blocks(drafter, self.target, batch, drafter.fuse_context(captured))
            if final is not None:  # take the states from which the target predicts the labels, any if there is no label
                positions = block_positions(anchors, config.block_size) - config.label_offset
                rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
                final = final[rows, positions.clamp(0, final.shape[1] - 1)]
            return self._losses_of(hidden, states, batch["columns"], batch["weights"], final, lambda_base)

    def _losses_of(
        self,
        hidden: torch.Tensor,
        states: torch.Tensor | None,
        columns: torch.Tensor,
        weights: torch.Tensor,
        final: torch.Tensor | None,
        lambda_base: float | None,
    ) -> DraftLosses:
        """Score drafted blocks, all `[B, N, K, ...]`, for a few of them at a time."""
        config = self.drafter.config
        hidden, columns, weights = (values.flatten(0, 1) for values in (hidden, columns, weights))
        states, final = (None if values is None else values.flatten(0, 1) for values in (states, final))
        learns = lambda_base is not None
        base, corrected, target_logits = lazy_logits(self.drafter, self.target, hidden, states, final)
        return domino_loss(
            base,
            corrected,
            columns,
            weights,
            lambda_base or 0.0,
            target_logits,
            distillation_weight=self.args.distillation_weight,
            dpace=learns and self.args.position_weights == "dpace",
            blocks_at_once=max(1, self.max_logits // (config.draft_width * config.block_size)),
            gathers=self.gathers,
        )
