"""The base-anchored loss: cross-entropy of corrected and base logits, never all in memory at once.

L = (1 - lambda_base) CE(corrected) + lambda_base CE(base), each a weighted sum over one global batch divided by the
sum of the weights; lambda_base falls linearly from 1 to 0 (arXiv 2605.29707). Without a correction head it is CE(base).

Shapes: M scored block positions, H hidden size, G width of the prefix state, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target import TargetModel


@dataclass(frozen=True)
class ScoredPositions:
    """The block positions that count, flat.

    Args:
        hidden (`torch.Tensor`): Draft hidden states `[M, H]`.
        states (`torch.Tensor`, *optional*): Prefix states `[M, G]` used with them; None without a correction head.
        is_corrected (`torch.Tensor`): `[M]` bool, False where base logits are final.
        labels (`torch.Tensor`): `[M]` int64.
        weights (`torch.Tensor`): `[M]` fp32.
    """

    hidden: torch.Tensor
    states: torch.Tensor | None
    is_corrected: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def split(self, size: int) -> list[ScoredPositions]:
        """Cut into pieces of at most `size` positions; at least one piece, which may be empty."""
        fields = (self.hidden, self.states, self.is_corrected, self.labels, self.weights)
        num_pieces = max(1, -(-len(self.labels) // size))
        pieces = [field.split(size) if field is not None else (None,) * num_pieces for field in fields]
        return [ScoredPositions(*piece) for piece in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class DraftLosses:
    """Weighted sums of cross-entropies in fp32, not yet divided by the weights of the global batch.

    Args:
        base (`torch.Tensor`): Scalar, of the base logits.
        corrected (`torch.Tensor`): Scalar, of the corrected logits; `base` itself without a correction head.
        is_correct (`torch.Tensor`): `[M]` bool, whether the drafter's first choice is the label.
        is_base_correct (`torch.Tensor`): The same of the base logits; while gradients are followed, which would pay
            for one more pass over the logits, `is_correct` itself.
    """

    base: torch.Tensor
    corrected: torch.Tensor
    is_correct: torch.Tensor
    is_base_correct: torch.Tensor

    def combine(self, lambda_base: float) -> torch.Tensor:
        """The training loss; both terms always take part, so that every parameter has a gradient."""
        if self.corrected is self.base:
            return self.base
        return (1 - lambda_base) * self.corrected + lambda_base * self.base


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


def draft_losses(
    drafter: DominoDraftModel, target: TargetModel, positions: ScoredPositions, max_logits_per_chunk: int
) -> DraftLosses:
    """Score positions in chunks; with more than one, their logits are computed again in the backward pass.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head.
        positions (`ScoredPositions`): M positions, M may be 0.
        max_logits_per_chunk (`int`): Most logits in one chunk, over all its positions.

    Returns:
        `DraftLosses`: Sums over all positions.
    """
    chunks = positions.split(max(1, max_logits_per_chunk // drafter.config.vocab_size))
    if len(chunks) == 1 or not torch.is_grad_enabled():
        parts = [_chunk_losses(drafter, target, chunk) for chunk in chunks]
    else:
        parts = [checkpoint(_chunk_losses, drafter, target, chunk, use_reentrant=False) for chunk in chunks]
    base, corrected, is_correct, is_base_correct = zip(*parts, strict=True)
    base_sum = torch.stack(base).sum()
    corrected_sum = torch.stack(corrected).sum() if drafter.has_correction_head else base_sum
    return DraftLosses(base_sum, corrected_sum, torch.cat(is_correct), torch.cat(is_base_correct))


def _chunk_losses(
    drafter: DominoDraftModel, target: TargetModel, chunk: ScoredPositions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    base, corrected = draft_logits(drafter, target, chunk)
    base_loss = corrected_loss = _weighted_sum(base, chunk)
    if corrected is not base:
        corrected_loss = _weighted_sum(corrected, chunk)
    is_correct = is_base_correct = corrected.detach().argmax(dim=-1) == chunk.labels
    if corrected is not base and not torch.is_grad_enabled():
        is_base_correct = base.argmax(dim=-1) == chunk.labels
    return base_loss, corrected_loss, is_correct, is_base_correct


def _weighted_sum(logits: torch.Tensor, chunk: ScoredPositions) -> torch.Tensor:
    return (F.cross_entropy(logits, chunk.labels, reduction="none") * chunk.weights).sum()
