"""The base-anchored loss: cross-entropy of corrected and base logits, as the formula says.

L = (1 - lambda_base) CE(corrected) + lambda_base CE(base), each a weighted sum over one global batch divided by the
sum of the weights; lambda_base falls linearly from 1 to 0 (arXiv 2605.29707). Without a correction head it is CE(base).

Shapes: M scored block positions, H hidden size, G width of the prefix state, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target import TargetModel
from hf_domino.training.distillation import Distillation


@dataclass(frozen=True)
class ScoredPositions:
    """The block positions that count, flat.

    Args:
        hidden (`torch.Tensor`): Draft hidden states `[M, H]`.
        states (`torch.Tensor`, *optional*): Prefix states `[M, G]` used with them; None without a correction head.
        is_corrected (`torch.Tensor`): `[M]` bool, False where base logits are final.
        labels (`torch.Tensor`): `[M]` int64.
        weights (`torch.Tensor`): `[M]` fp32.
        final (`torch.Tensor`, *optional*): The target's final hidden states `[M, H]` before the labels, to learn from.
    """

    hidden: torch.Tensor
    states: torch.Tensor | None
    is_corrected: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    final: torch.Tensor | None = None

    def split(self, size: int) -> list[ScoredPositions]:
        """Cut into pieces of at most `size` positions; at least one piece, which may be empty."""
        fields = (self.hidden, self.states, self.is_corrected, self.labels, self.weights, self.final)
        num_pieces = max(1, -(-len(self.labels) // size))
        pieces = [field.split(size) if field is not None else (None,) * num_pieces for field in fields]
        return [ScoredPositions(*piece) for piece in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class DraftLosses:
    """Weighted sums of losses in fp32, not yet divided by the weights of the global batch.

    Args:
        loss (`torch.Tensor`): Scalar, what is trained: both terms always take part, so that every parameter has a
            gradient.
        base (`torch.Tensor`): Scalar, of the base logits; a figure without gradient, as is the next one.
        corrected (`torch.Tensor`): Scalar, of the corrected logits; equal to `base` without a correction head.
        is_correct (`torch.Tensor`): `[M]` bool, whether the drafter's first choice is the label.
    """

    loss: torch.Tensor
    base: torch.Tensor
    corrected: torch.Tensor
    is_correct: torch.Tensor


def lambda_base_at(step: int, num_steps: int, decay_ratio: float) -> float:
    """Share of the base term: 1 at step 0, 0 from `decay_ratio * num_steps` on, linear between.

    Args:
        step (`int`): Optimizer steps done.
        num_steps (`int`): Optimizer steps of the whole training.
        decay_ratio (`float`): Share of training over which it falls, in [0, 1].

    Returns:
        `float`: In [0, 1].

    Example:
    ```python
    >>> from hf_domino.training.losses import lambda_base_at
    >>> [lambda_base_at(step, 100, 0.5) for step in (0, 25, 50, 99)]
    [1.0, 0.5, 0.0, 0.0]

    ```
    """
    if decay_ratio <= 0:
        return 0.0
    return max(0.0, 1.0 - step / max(decay_ratio * num_steps, 1))


def draft_logits(
    drafter: DominoDraftModel, target: TargetModel, positions: ScoredPositions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base and corrected logits of some positions.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head.
        positions (`ScoredPositions`): M positions.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both `[M, V]` in fp32; the same tensor without a correction head.
    """
    base = target.logits(positions.hidden).float()
    if positions.states is None:
        return base, base
    head = drafter.embed_proj
    low_rank = head.project_hidden(positions.hidden) + head.project_state(positions.states)
    return base, base + head.expand(low_rank).float() * positions.is_corrected[:, None]


def score_chunk(
    drafter: DominoDraftModel,
    target: TargetModel,
    chunk: ScoredPositions,
    lambda_base: float,
    distillation: Distillation | None = None,
) -> DraftLosses:
    """Score positions whose logits fit into memory, as the formula says.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head.
        chunk (`ScoredPositions`): M positions, M may be 0.
        lambda_base (`float`): Share of the base term in `loss`, in [0, 1].
        distillation (`Distillation`, *optional*): What is learned from `chunk.final`; None for labels alone.

    Returns:
        `DraftLosses`: Sums over the chunk.
    """
    base, corrected = draft_logits(drafter, target, chunk)
    taught = None
    if distillation is not None:
        assert chunk.final is not None
        taught = distillation.teach(target, chunk.final)
    is_correct = corrected.detach().argmax(dim=-1) == chunk.labels
    loss = base_loss = corrected_loss = _weighted_sum(base, chunk, distillation, taught)
    if corrected is not base:
        corrected_loss = _weighted_sum(corrected, chunk, distillation, taught)
        loss = (1 - lambda_base) * corrected_loss + lambda_base * base_loss
    return DraftLosses(loss, base_loss.detach(), corrected_loss.detach(), is_correct)


def _weighted_sum(
    logits: torch.Tensor, chunk: ScoredPositions, distillation: Distillation | None, taught: torch.Tensor | None
) -> torch.Tensor:
    losses = F.cross_entropy(logits, chunk.labels, reduction="none")
    if distillation is not None and taught is not None:
        losses = distillation.mix(losses, logits, taught)
    return (losses * chunk.weights).sum()
