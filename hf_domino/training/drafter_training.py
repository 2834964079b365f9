"""`DrafterTraining`: a drafter and its frozen target as one module, for which a batch is a loss.

The trainer wraps this module (in `DistributedDataParallel`, in a compiled module, in autocast), because wrappers only
follow what happens inside the forward of the module that they wrap. Checkpoints hold the drafter itself, under its own
names.

Shapes: B batch, S sequence length, C hidden states kept per token, N blocks per sequence, K block size, H hidden size.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from hf_domino.configuration.domino_config import DominoConfig
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


def loss_decay_of(config: DominoConfig, args: TrainingFields) -> float:
    """Return the number of positions after which a weight in the loss has fallen to 1/e."""
    published = LOSS_DECAY_BY_BLOCK_SIZE.get(config.block_size, round(0.45 * config.block_size, 2))
    return args.loss_decay or config.loss_decay or published


class DrafterTraining(nn.Module):
    """Drafts and scores the blocks of a batch; the forward returns the losses.

    Args:
        drafter (`DominoDraftModel`): The drafter, which is trained, with the layers of an adapter if it has one.
        target (`TargetModel`): The frozen target. It is no part of the module: it is neither moved, nor wrapped, nor
            among the parameters, nor saved.
        args (`TrainingFields`): Arguments, of which `loss_decay` and the loss options are read.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> from hf_domino import DominoConfig, DominoDraftModel
    >>> from hf_domino.targets.view import TargetModel
    >>> from hf_domino.training.drafter_training import DrafterTraining
    >>> from hf_domino.training.fields import TrainingFields
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... )).requires_grad_(False)
    >>> drafter = DominoDraftModel(DominoConfig.for_target(target.config, block_size=4))
    >>> view = TargetModel(target, drafter.config.layer_ids(target.config))
    >>> training = DrafterTraining(drafter, view, TrainingFields())
    >>> ids = torch.arange(8)[None]
    >>> batch = {"input_ids": ids, "loss_mask": torch.ones_like(ids), "anchors": torch.tensor([[1, 3]])}
    >>> losses = training(**batch, lambda_base=0.5)
    >>> losses.loss.backward()

    ```
    """

    def __init__(self, drafter: DominoDraftModel, target: TargetModel, args: TrainingFields):
        super().__init__()
        self.drafter = drafter
        self.target = target
        self.args = args
        config = drafter.config
        self.loss_decay = loss_decay_of(config, args)
        self.gathers = not args.is_static
        self.max_logits = MOST_LOGITS
        if self.gathers:
            self.max_logits = min(MOST_LOGITS, POSITIONS_IN_CACHE * config.draft_width)

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

    def forward(self, lambda_base: float | None = None, **batch: torch.Tensor) -> DraftLosses:
        """Draft and score the B * N blocks of a batch, a few of them at a time.

        Args:
            lambda_base (`float`, *optional*): Share of the base term in the loss. Without it, the batch is evaluated
                with the published loss, never with distillation or D-PACE, so that different trainings can be compared.
            batch (`torch.Tensor`): `input_ids` and `loss_mask` `[B, S]`, `anchors` `[B, N]`, and optionally
                `hidden_states` `[B, S, C, H]`, with which the target does not run. If the columns of
                [`~DrafterTraining.label`] are missing, they are added.
        """
        evaluating = lambda_base is None
        if "columns" not in batch:
            self.label(batch, evaluating)
        drafter = self.drafter
        config = drafter.config
        anchors = batch["anchors"]
        captured, final = read_target(self.target, batch, final=self.args.distillation_weight > 0 and not evaluating)
        hidden, states = draft_blocks(drafter, self.target, batch, drafter.fuse_context(captured))
        if final is not None:  # take the states from which the target predicts the labels, any if there is no label
            positions = block_positions(anchors, config.block_size) - config.label_offset
            rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
            final = final[rows, positions.clamp(0, final.shape[1] - 1)].flatten(0, 1)  # [B * N, K, H]
        states = None if states is None else states.flatten(0, 1)
        base, corrected, target_logits = lazy_logits(drafter, self.target, hidden.flatten(0, 1), states, final)
        return domino_loss(
            base,
            corrected,
            batch["columns"].flatten(0, 1),
            batch["weights"].flatten(0, 1),
            lambda_base or 0.0,
            target_logits,
            distillation_weight=self.args.distillation_weight,
            dpace=self.args.position_weights == "dpace" and not evaluating,
            blocks_at_once=max(1, self.max_logits // (config.draft_width * config.block_size)),
            gathers=self.gathers,
        )
