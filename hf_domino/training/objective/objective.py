"""The training objective of one batch: its labels, the target's hidden states, and the losses of the drafted blocks.

In training, everything that uses the drafter's weights is called inside the forward of the wrapped model, because
data-parallel wrappers only follow what happens there: `model(within=partial(objective.score, batch))`.

Blocks are scored in chunks, and the gradients of a chunk are computed while its logits are in memory. The backward pass
does not compute the logits again; it only scales these gradients (as Liger's fused losses do, arXiv 2410.10989).
lm_head is called and differentiated as a module, so it can be quantised or offloaded.

Shapes: B batch, S sequence length, N blocks per sequence (in `ScoredBlocks`, blocks of all sequences), K block size, M
scored positions of N blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hf_domino.methods import DominoDraftModel
from hf_domino.methods.side_by_side import block_positions
from hf_domino.targets.view import TargetModel
from hf_domino.training.fields import TrainingFields
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.forward import Batch, draft_blocks, read_target
from hf_domino.training.objective.losses import (
    DraftLosses,
    LeanCrossEntropy,
    ScoredBlocks,
    corrected_positions,
    draft_logits,
    dynamic_weights,
    teach,
)

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
            of_blocks = (hidden, states, batch["columns"], batch["weights"], final)
            flat: list[Any] = [None if part is None else part.flatten(0, 1) for part in of_blocks]  # [B * N, ...]
            return self._score_in_chunks(ScoredBlocks(*flat), lambda_base)

    def _score_in_chunks(self, blocks: ScoredBlocks, lambda_base: float | None) -> DraftLosses:
        """Score blocks in chunks, so that their logits are never all in memory, and compute gradients if needed."""
        config = self.drafter.config
        chunks = blocks.split(max(1, self.max_logits // (config.draft_width * config.block_size)))
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # the compiler makes its own backward pass
            return _sum_up([self._score_chunk(chunk, lambda_base) for chunk in chunks])
        trained = [parameter for parameter in self.drafter.head_parameters() if parameter.requires_grad]
        inputs = {name: field for name, field in blocks._asdict().items() if field is not None and field.requires_grad}
        of_positions = []
        parts = list[DraftLosses]()
        of_parameters: Sequence[torch.Tensor] = ()
        for chunk in chunks:
            leaves = {name: getattr(chunk, name).detach().requires_grad_() for name in inputs}
            part = self._score_chunk(chunk._replace(**leaves), lambda_base)
            wanted = (*leaves.values(), *trained)
            gradients = torch.autograd.grad(part.loss, wanted, allow_unused=True, materialize_grads=True)
            of_positions.append(gradients[: len(leaves)])
            own = gradients[len(leaves) :]
            if parts:
                of_parameters = [total.add_(one) for total, one in zip(of_parameters, own, strict=True)]
            else:
                of_parameters = own
            parts.append(part._replace(loss=part.loss.detach()))
        found = [*map(torch.cat, zip(*of_positions, strict=True)), *of_parameters]
        losses = _sum_up(parts)
        return losses._replace(loss=_WithGradients.apply(losses.loss, found, *inputs.values(), *trained))

    def _score_chunk(self, chunk: ScoredBlocks, lambda_base: float | None) -> DraftLosses:
        """Score N blocks whose logits fit into memory, by the formula of `losses.py`.

        On a CPU, logits are computed only at the M positions that carry a loss, which saves the products of the others.
        Elsewhere they are computed at all positions, so that nothing waits for M, and shapes do not depend on the text.
        """
        drafter = self.drafter
        target = self.target
        counts = chunk.weights > 0
        has_loss = counts & (chunk.labels >= 0)
        weights = torch.where(has_loss, chunk.weights, 0.0)
        places = has_loss.flatten().nonzero()[:, 0] if self.gathers else None

        def take(values: torch.Tensor) -> torch.Tensor:  # [N, K, ...] to [M, ...]
            flat = values.flatten(0, 1)
            if places is None:
                return flat
            return flat.index_select(0, places)

        def put_back(values: torch.Tensor) -> torch.Tensor:  # [M] to [N, K], zeros elsewhere
            if places is not None:
                values = values.new_zeros(has_loss.numel()).index_copy(0, places, values)
            return values.view(has_loss.shape)

        labels = take(chunk.labels).clamp(min=0)
        states = None if chunk.states is None else take(chunk.states)
        is_corrected = take(corrected_positions(drafter.config, labels.device).expand_as(has_loss))
        base, corrected = draft_logits(drafter, target, take(chunk.hidden), states, is_corrected)
        taught = None
        if chunk.final is not None:
            taught = teach(drafter.vocabulary, target, take(chunk.final))

        def loss_of(logits: torch.Tensor) -> torch.Tensor:
            losses = LeanCrossEntropy.apply(logits, labels)
            scale = weights
            if lambda_base is not None and self.args.position_weights == "dpace":
                confidence = put_back(losses.detach()).neg().exp() * has_loss
                scale = weights * dynamic_weights(confidence, counts)
            if taught is not None:
                probs, entropy = taught
                learned = LeanCrossEntropy.apply(logits, probs) - entropy
                share = self.args.distillation_weight
                # At a share of 1, `lerp` would only cost passes over the logits for a gradient of zero.
                losses = learned if share == 1 else torch.lerp(losses, learned, share)
            return (put_back(losses) * scale).sum()

        def hits(logits: torch.Tensor) -> torch.Tensor:
            return put_back(logits.detach().argmax(dim=-1) == labels) & has_loss

        is_correct = is_base_correct = hits(corrected)
        loss = base_loss = corrected_loss = loss_of(base)
        if corrected is not base:
            corrected_loss = loss_of(corrected)
            share = lambda_base or 0.0
            loss = (1 - share) * corrected_loss + share * base_loss
            if not torch.is_grad_enabled():
                is_base_correct = hits(base)
        return DraftLosses(loss, base_loss.detach(), corrected_loss.detach(), is_correct, is_base_correct)


def _sum_up(parts: list[DraftLosses]) -> DraftLosses:
    *losses, is_correct, is_base_correct = zip(*parts, strict=True)
    loss, base, corrected = (torch.stack(some).sum() for some in losses)
    return DraftLosses(loss, base, corrected, torch.cat(is_correct), torch.cat(is_base_correct))


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are already computed."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss; `gradients` are its gradients with respect to `inputs`."""
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients times `grad_loss`; they are scaled in place, so this can run only once."""
        return None, None, *(gradient.mul_(grad_loss) for gradient in ctx.__dict__.pop("gradients"))
