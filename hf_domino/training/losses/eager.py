"""The loss of a drafter as the papers write it, in plain PyTorch: the reference for `chunked.py`, which trains.

Shapes: N blocks, K block size, D tokens that can be drafted (one column each).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

ALPHA = 0.5  # smoothing of dynamic weights, in (0, 1]; at 0, all of them could vanish


class DraftLosses(NamedTuple):
    """Weighted sums of losses in fp32, not yet divided by the weights of the global batch.

    Args:
        loss (`torch.Tensor`): Scalar, the loss that is trained. Both terms always take part, so that every parameter
            has a gradient.
        base (`torch.Tensor`): Scalar, the loss of the base logits, for logging and without gradient.
        corrected (`torch.Tensor`): Scalar, the loss of the corrected logits, also without gradient; equal to `base`
            without a correction head.
        is_correct (`torch.Tensor`): `[N, K]` bool, True where the label carries a loss and is the drafter's first
            choice.
        is_base_correct (`torch.Tensor`): The same for the base logits. `chunked.py` does not compute it in training,
            where it is `is_correct`.
    """

    loss: torch.Tensor
    base: torch.Tensor
    corrected: torch.Tensor
    is_correct: torch.Tensor
    is_base_correct: torch.Tensor


def domino_loss(
    base: torch.Tensor,
    corrected: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    lambda_base: float,
    target_logits: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
    dpace: bool = False,
) -> DraftLosses:
    """Compute the base-anchored loss, (1 - lambda_base) L(corrected) + lambda_base L(base) (arXiv 2605.29707).

    L is [`draft_loss`], a weighted sum over all positions. The trainer divides it by the sum of the weights of the
    global batch, and lets `lambda_base` fall from 1 to 0 ([`lambda_base_at`]).

    Args:
        base (`torch.Tensor`): Logits of the backbone, `[N, K, D]`.
        corrected (`torch.Tensor`): Logits after the correction head, `[N, K, D]`; without a head, `base` itself, and
            the loss is L(base).
        labels (`torch.Tensor`): Columns of the tokens to predict, `[N, K]` int64; -1 if the draft vocabulary lacks the
            token. Such a label counts as a miss, but carries no loss.
        weights (`torch.Tensor`): `[N, K]`, 0 where a label does not count.
        lambda_base (`float`): Share of the base term, in [0, 1].
        target_logits (`torch.Tensor`, *optional*): The target's logits for the same tokens, `[N, K, D]`.
        distillation_weight, dpace (*optional*): Options of [`draft_loss`].
    """
    options = (labels, weights, target_logits, distillation_weight, dpace)
    base_loss = corrected_loss = loss = draft_loss(base, *options)
    if corrected is not base:
        corrected_loss = draft_loss(corrected, *options)
        loss = (1 - lambda_base) * corrected_loss + lambda_base * base_loss
    has_loss = (weights > 0) & (labels >= 0)
    hits = [(logits.argmax(dim=-1) == labels) & has_loss for logits in (corrected, base)]
    return DraftLosses(loss, base_loss.detach(), corrected_loss.detach(), *hits)


def draft_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    target_logits: torch.Tensor | None = None,
    distillation_weight: float = 0.0,
    dpace: bool = False,
) -> torch.Tensor:
    """Sum the weighted losses of some logits over all positions.

    The loss of a position is the cross-entropy with its label. With distillation, it is (1 - distillation_weight)
    cross-entropy + distillation_weight KL(target || drafter) (arXiv 1503.02531).

    Args:
        logits (`torch.Tensor`): The drafter's logits `[N, K, D]`.
        labels, weights (`torch.Tensor`): `[N, K]`, as for [`domino_loss`].
        target_logits (`torch.Tensor`, *optional*): The target's logits `[N, K, D]`, for distillation.
        distillation_weight (`float`, *optional*, defaults to 0.0): Share of the distillation, in [0, 1].
        dpace (`bool`, *optional*, defaults to `False`): Whether to also weight positions by [`dynamic_weights`].
    """
    counts = weights > 0
    has_loss = counts & (labels >= 0)
    losses = cross_entropy(logits, labels.clamp(min=0))
    weights = torch.where(has_loss, weights, 0.0)
    if dpace:
        confidence = losses.detach().neg().exp() * has_loss
        weights = weights * dynamic_weights(confidence, counts)
    if target_logits is not None:
        losses = torch.lerp(losses, kl_divergence(logits, target_logits), distillation_weight)
    return (losses * weights).sum()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the cross-entropy `[...]` of logits `[..., D]` with labels `[...]`, in nats."""
    return F.log_softmax(logits, dim=-1).gather(-1, labels[..., None])[..., 0].neg()


def kl_divergence(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Compute KL(target || drafter) `[...]` in nats from the logits `[..., D]` of both."""
    expected = F.log_softmax(target_logits, dim=-1)
    return (expected.exp() * (expected - F.log_softmax(logits, dim=-1))).sum(dim=-1)


def dynamic_weights(confidence: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Weight the positions of a block by how much each limits acceptance now (D-PACE, arXiv 2605.18810, eq. 7 to 9).

    Let q_i be the drafter's probability of the label at position i, and q~_i = (1 - ALPHA) q_i + ALPHA. The weight of
    position j is the sum over m >= j of the product over i <= m of q~_i. Without smoothing, this is the derivative of
    the expected accepted length with respect to log q_j. Labels that do not count are skipped and get weight 0. The
    weights carry no gradient, and they are not divided by their sum, because their size is part of the objective.

    Args:
        confidence (`torch.Tensor`): The drafter's probability of each label `[..., K]`.
        counts (`torch.Tensor`): `[..., K]` bool, False for labels that do not count.

    Example:
    ```python
    >>> import torch
    >>> from hf_domino.training.losses.eager import dynamic_weights
    >>> dynamic_weights(torch.tensor([0.5, 0.0, 1.0]), torch.tensor([True, True, True]))
    tensor([1.5000, 0.7500, 0.3750])

    ```
    """
    smooth = torch.where(counts, torch.lerp(confidence, torch.ones_like(confidence), ALPHA), 1.0)
    accepted = smooth.cumprod(dim=-1) * counts
    return accepted.flip(-1).cumsum(dim=-1).flip(-1) * counts


def lambda_base_at(step: int, num_steps: int, decay_ratio: float, start: float = 1.0) -> float:
    """Compute the share of the base term: `start` at step 0, falling linearly to 0 at `decay_ratio * num_steps`.

    Args:
        step (`int`): Number of optimizer steps done.
        num_steps (`int`): Number of optimizer steps of the whole training.
        decay_ratio (`float`): Share of the training over which it falls, in [0, 1].
        start (`float`, *optional*, defaults to 1.0): Share at step 0, in [0, 1]; below 1 to train a drafter further.

    Returns:
        `float`: The share, in [0, 1].

    Example:
    ```python
    >>> from hf_domino.training.losses.eager import lambda_base_at
    >>> [lambda_base_at(step, 100, 0.5) for step in (0, 25, 50, 99)]
    [1.0, 0.5, 0.0, 0.0]

    ```
    """
    if decay_ratio <= 0:
        return 0.0
    return start * max(0.0, 1.0 - step / max(decay_ratio * num_steps, 1))
