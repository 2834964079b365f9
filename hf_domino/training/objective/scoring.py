"""The loss of many positions, whose logits are never all in memory at once.

Positions are scored chunk by chunk, and the gradients of a chunk are made while its logits are there: they are not
computed again in the backward pass, which only scales what was found (as Liger's fused losses do, arXiv 2410.10989).
lm_head is called and differentiated as a module, so it may be quantised or offloaded.

Shapes: N blocks, K block size, M of their positions, H hidden size, G width of a head's state, D tokens that are
drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.losses import PUBLISHED, DraftLosses, LossOptions, ScoredBlocks, score_chunk


def draft_losses(
    drafter: DominoDraftModel,
    target: TargetModel,
    blocks: ScoredBlocks,
    lambda_base: float,
    max_logits_per_chunk: int,
    options: LossOptions = PUBLISHED,
    gathers: bool = True,
) -> DraftLosses:
    """Score blocks in chunks, each with its gradients where they are wanted.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head, which is frozen: it is given no gradient.
        blocks (`ScoredBlocks`): N blocks.
        lambda_base (`float`): Share of the base term in `loss`, in [0, 1].
        max_logits_per_chunk (`int`): Most logits in one chunk, which is of one block at least.
        options (`LossOptions`, *optional*): What else the loss is made of.
        gathers (`bool`, *optional*, defaults to `True`): As in [`score_chunk`].

    Returns:
        `DraftLosses`: Sums over all blocks.
    """
    score = partial(score_chunk, drafter, target, lambda_base=lambda_base, options=options, gathers=gathers)
    chunks = blocks.split(max(1, max_logits_per_chunk // (drafter.config.draft_width * drafter.config.block_size)))
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # which makes its own backward pass
        return _sum_up([score(chunk) for chunk in chunks])
    trained = [parameter for parameter in drafter.kind.head_parameters() if parameter.requires_grad]
    return DraftLosses(*_GradientsAtOnce.apply(score, chunks, blocks.hidden, blocks.states, *trained))


def _sum_up(parts: list[DraftLosses]) -> DraftLosses:
    loss, base, corrected = (
        torch.stack([getattr(part, name) for part in parts]).sum() for name in ("loss", "base", "corrected")
    )
    hits = (torch.cat([getattr(part, name) for part in parts]) for name in ("is_correct", "is_base_correct"))
    return DraftLosses(loss, base, corrected, *hits)


class _GradientsAtOnce(torch.autograd.Function):
    """Sums chunks, and keeps the gradients of hidden states `[N, K, H]`, states of the head and parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        score: Callable[[ScoredBlocks], DraftLosses],
        chunks: list[ScoredBlocks],
        hidden: torch.Tensor,
        states: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The fields of [`DraftLosses`], the first with a gradient."""
        fields = {"hidden": hidden, "states": states}
        names = [name for name, field in fields.items() if field is not None and field.requires_grad]
        parts, of_positions = [], []
        of_parameters: list[torch.Tensor] = []
        for chunk in chunks:
            leaves = [getattr(chunk, name).detach().requires_grad_() for name in names]
            with torch.enable_grad():
                part = score(replace(chunk, **dict(zip(names, leaves, strict=True))))
            wanted = (*leaves, *parameters)
            gradients = torch.autograd.grad(part.loss, wanted, allow_unused=True, materialize_grads=True)
            of_positions.append(gradients[: len(leaves)])
            of_parameters = of_parameters or list(gradients[len(leaves) :])
            for total, gradient in zip(of_parameters, gradients[len(leaves) :], strict=True):
                if total is not gradient:
                    total += gradient
            parts.append(replace(part, loss=part.loss.detach()))
        pieces = zip(*of_positions, strict=True)
        ctx.of_positions = {name: torch.cat(some) for name, some in zip(names, pieces, strict=True)}
        ctx.of_parameters = of_parameters
        losses = _sum_up(parts)
        figures = losses.base, losses.corrected, losses.is_correct, losses.is_base_correct
        ctx.mark_non_differentiable(*figures)
        return losses.loss, *figures

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """What was found, times the gradient of the sum; scaled where it lies, so it serves once."""
        of_positions, of_parameters = ctx.__dict__.pop("of_positions"), ctx.__dict__.pop("of_parameters")
        for gradient in (*of_positions.values(), *of_parameters):
            gradient.mul_(grad_loss)
        return None, None, of_positions.get("hidden"), of_positions.get("states"), *of_parameters
