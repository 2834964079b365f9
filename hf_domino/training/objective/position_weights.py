"""D-PACE: weights of a block's positions that follow what limits acceptance now (arXiv 2605.18810, equations 7 to 9).

With q_i the drafter's probability of the label at position i and q~_i = (1 - alpha) q_i + alpha, the weight of position
j is the sum over m >= j of the product over i <= m of q~_i: without smoothing, the derivative of the expected accepted
length with respect to log q_j. Labels that do not count are passed by. Weights carry no gradient, and are not divided
by their sum: their size is part of the objective.

Shapes: K block size.
"""

from __future__ import annotations

import torch


def dynamic_weights(confidence: torch.Tensor, counts: torch.Tensor, alpha: float) -> torch.Tensor:
    """Weights of the positions of blocks.

    Args:
        confidence (`torch.Tensor`): The drafter's probability of each label `[..., K]`.
        counts (`torch.Tensor`): `[..., K]` bool, False for labels that do not count.
        alpha (`float`): Smoothing, in (0, 1]; with 1, weights fall linearly whatever the drafter can do.

    Returns:
        `torch.Tensor`: `[..., K]`, 0 where a label does not count.

    Example:
    ```python
    >>> import torch
    >>> from hf_domino.training.objective.position_weights import dynamic_weights
    >>> dynamic_weights(torch.tensor([0.5, 0.0, 1.0]), torch.tensor([True, True, True]), alpha=0.5)
    tensor([1.5000, 0.7500, 0.3750])

    ```
    """
    smooth = torch.where(counts, torch.lerp(confidence, torch.ones_like(confidence), alpha), 1.0)
    accepted = smooth.cumprod(dim=-1) * counts
    return accepted.flip(-1).cumsum(dim=-1).flip(-1) * counts
