"""The base-anchored loss: cross-entropy of corrected and base logits, as the formula says.

L = (1 - lambda_base) CE(corrected) + lambda_base CE(base), each a weighted sum over one global batch divided by the
sum of the weights; lambda_base falls linearly from 1 to 0 (arXiv 2605.29707). Without a correction head it is CE(base).
With a draft vocabulary both are over its tokens, and labels that are not among them carry no loss.

Shapes: M scored block positions, H hidden size, G width of the prefix state, D tokens that are drafted, all of the
target's or fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn.functional as F

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.distillation import Distillation, TaughtLaw
from hf_domino.training.objective.position_weights import weigh_flat


@dataclass(frozen=True)
class ScoredPositions:
    """The block positions that count, flat.

    Args:
        hidden (`torch.Tensor`): Draft hidden states `[M, H]`.
        states (`torch.Tensor`, *optional*): Prefix states `[M, G]` used with them; None without a correction head.
        is_corrected (`torch.Tensor`): `[M]` bool, False where base logits are final.
        labels (`torch.Tensor`): Columns of the labels `[M]` int64.
        weights (`torch.Tensor`): `[M]` fp32.
        final (`torch.Tensor`, *optional*): The target's final hidden states `[M, H]` before the labels, to learn from.
        places (`torch.Tensor`, *optional*): Block and position in it `[M, 2]`, where blocks must not be cut.
        outside (`torch.Tensor`, *optional*): Which labels of its block `[M, K]` are not in the draft vocabulary.
    """

    hidden: torch.Tensor
    states: torch.Tensor | None
    is_corrected: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    final: torch.Tensor | None = None
    places: torch.Tensor | None = None
    outside: torch.Tensor | None = None

    def split(self, size: int) -> list[ScoredPositions]:
        """Cut into pieces of at most `size` positions; at least one piece, which may be empty.

        With `places`, pieces are of whole blocks, and a block of more positions than `size` is a piece.
        """
        if self.places is not None:
            return self._split_by(_lengths_of_whole_blocks(self.places[:, 0], size))
        num_positions = len(self.labels)
        return self._split_by([min(size, num_positions - start) for start in range(0, max(num_positions, 1), size)])

    def _split_by(self, lengths: list[int]) -> list[ScoredPositions]:
        values = [getattr(self, field.name) for field in fields(self)]
        pieces = [value.split(lengths) if value is not None else (None,) * len(lengths) for value in values]
        return [ScoredPositions(*piece) for piece in zip(*pieces, strict=True)]


def _lengths_of_whole_blocks(blocks: torch.Tensor, size: int) -> list[int]:
    """Lengths of pieces of at most `size` positions that end where a block `[M]` does."""
    lengths = [0]
    for length in blocks.unique_consecutive(return_counts=True)[1].tolist():
        if lengths[-1] and lengths[-1] + length > size:
            lengths.append(0)
        lengths[-1] += length
    return lengths


@dataclass(frozen=True)
class LossOptions:
    """What the published loss does not have.

    Args:
        distillation (`Distillation`, *optional*): What is learned from `ScoredPositions.final`.
        dpace_alpha (`float`, *optional*): Smoothing of dynamic weights
            ([`~training.objective.position_weights`]), which multiply the given ones, each term by its own confidence;
            needs `ScoredPositions.places`.
    """

    distillation: Distillation | None = None
    dpace_alpha: float | None = None


PUBLISHED = LossOptions()
CrossEntropy = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
cross_entropies = partial(F.cross_entropy, reduction="none")


@dataclass(frozen=True)
class DraftLosses:
    """Weighted sums of losses in fp32, not yet divided by the weights of the global batch.

    Args:
        loss (`torch.Tensor`): Scalar, what is trained: both terms always take part, so that every parameter has a
            gradient.
        base (`torch.Tensor`): Scalar, of the base logits; a figure without gradient, as is the next one.
        corrected (`torch.Tensor`): Scalar, of the corrected logits; equal to `base` without a correction head.
        is_correct (`torch.Tensor`): `[M]` bool, whether the drafter's first choice is the label.
        is_base_correct (`torch.Tensor`): The same of the base logits; while gradients are followed, which would pay
            for one more pass over the logits, `is_correct` itself.
    """

    loss: torch.Tensor
    base: torch.Tensor
    corrected: torch.Tensor
    is_correct: torch.Tensor
    is_base_correct: torch.Tensor


def lambda_base_at(step: int, num_steps: int, decay_ratio: float, start: float = 1.0) -> float:
    """Share of the base term: `start` at step 0, 0 from `decay_ratio * num_steps` on, linear between.

    Args:
        step (`int`): Optimizer steps done.
        num_steps (`int`): Optimizer steps of the whole training.
        decay_ratio (`float`): Share of training over which it falls, in [0, 1].
        start (`float`, *optional*, defaults to 1.0): In [0, 1]; below 1 to train a drafter further.

    Returns:
        `float`: In [0, 1].

    Example:
    ```python
    >>> from hf_domino.training.objective.losses import lambda_base_at
    >>> [lambda_base_at(step, 100, 0.5) for step in (0, 25, 50, 99)]
    [1.0, 0.5, 0.0, 0.0]

    ```
    """
    if decay_ratio <= 0:
        return 0.0
    return start * max(0.0, 1.0 - step / max(decay_ratio * num_steps, 1))


def draft_logits(
    drafter: DominoDraftModel, target: TargetModel, positions: ScoredPositions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base and corrected logits of some positions.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head.
        positions (`ScoredPositions`): M positions.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both `[M, D]` in fp32; the same tensor without a correction head.
    """
    base = drafter.vocabulary.logits(target, positions.hidden).float()
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
    options: LossOptions = PUBLISHED,
    cross_entropy: CrossEntropy = cross_entropies,
) -> DraftLosses:
    """Score positions whose logits fit into memory, as the formula says.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head.
        chunk (`ScoredPositions`): M positions, M may be 0.
        lambda_base (`float`): Share of the base term in `loss`, in [0, 1].
        options (`LossOptions`, *optional*): What else the loss is made of.
        cross_entropy (`Callable`, *optional*): Of logits `[M, D]` and labels `[M]`, gives `[M]`.

    Returns:
        `DraftLosses`: Sums over the chunk.
    """
    base, corrected = draft_logits(drafter, target, chunk)
    taught = None
    if options.distillation is not None:
        assert chunk.final is not None
        with torch.no_grad():
            taught = options.distillation.teach(drafter.vocabulary.logits(target, chunk.final))
    is_correct = is_base_correct = corrected.detach().argmax(dim=-1) == chunk.labels
    loss = base_loss = corrected_loss = _weighted_sum(cross_entropy(base, chunk.labels), base, chunk, options, taught)
    if corrected is not base:
        corrected_loss = _weighted_sum(cross_entropy(corrected, chunk.labels), corrected, chunk, options, taught)
        loss = (1 - lambda_base) * corrected_loss + lambda_base * base_loss
        if not torch.is_grad_enabled():
            is_base_correct = base.argmax(dim=-1) == chunk.labels
    return DraftLosses(loss, base_loss.detach(), corrected_loss.detach(), is_correct, is_base_correct)


def _weighted_sum(
    losses: torch.Tensor,
    logits: torch.Tensor,
    chunk: ScoredPositions,
    options: LossOptions,
    taught: TaughtLaw | None,
) -> torch.Tensor:
    weights = chunk.weights
    if options.dpace_alpha is not None:
        assert chunk.places is not None
        weights = weights * weigh_flat(losses, chunk.places, options.dpace_alpha, chunk.outside)
    if options.distillation is not None and taught is not None:
        losses = options.distillation.mix(losses, logits, taught)
    return (losses * weights).sum()
