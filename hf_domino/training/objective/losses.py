"""The base-anchored loss: cross-entropy of corrected and base logits, as the formula says.

L = (1 - lambda_base) CE(corrected) + lambda_base CE(base), each a weighted sum over one global batch divided by the
sum of the weights; lambda_base falls linearly from 1 to 0 (arXiv 2605.29707). Without a correction head it is CE(base).
With a draft vocabulary both are over its tokens, and labels that are not among them carry no loss.

With distillation each CE(label) is (1 - weight) CE(label) + weight D, where D is KL(target || drafter) (arXiv
1503.02531). The distribution of the token at position p is the target's after position p - 1; with a draft vocabulary,
that of its tokens, renormalised.

Shapes: N blocks, K block size, M of their positions, H hidden size, G width of a head's state, D tokens that are
drafted, all of the target's or fewer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.vocabulary import DraftVocabulary
from hf_domino.target.view import TargetModel


class ScoredBlocks(NamedTuple):
    """Blocks, and what their positions are scored on.

    Args:
        hidden (`torch.Tensor`): Draft hidden states `[N, K, H]`.
        states (`torch.Tensor`, *optional*): The head's states `[N, K, G]` used with them; None without a head.
        labels (`torch.Tensor`): Columns of the labels `[N, K]` int64; -1 where the label is not drafted, which counts
            and carries no loss.
        weights (`torch.Tensor`): `[N, K]` fp32, 0 where a label does not count.
        final (`torch.Tensor`, *optional*): The target's final hidden states `[N, K, H]` before the labels, to learn
            from.
    """

    hidden: torch.Tensor
    states: torch.Tensor | None
    labels: torch.Tensor
    weights: torch.Tensor
    final: torch.Tensor | None = None

    def split(self, size: int) -> list[ScoredBlocks]:
        """Cut into pieces of at most `size` blocks."""
        count = -(-len(self.labels) // size)
        pieces = [(None,) * count if value is None else value.split(size) for value in self]
        return [ScoredBlocks(*piece) for piece in zip(*pieces, strict=True)]


ALPHA = 0.5  # smoothing of dynamic weights, in (0, 1]: at 0 all of them may vanish


class DraftLosses(NamedTuple):
    """Weighted sums of losses in fp32, not yet divided by the weights of the global batch.

    Args:
        loss (`torch.Tensor`): Scalar, what is trained: both terms always take part, so that every parameter has a
            gradient.
        base (`torch.Tensor`): Scalar, of the base logits; a figure without gradient, as is the next one.
        corrected (`torch.Tensor`): Scalar, of the corrected logits; equal to `base` without a correction head.
        is_correct (`torch.Tensor`): `[N, K]` bool, whether the drafter's first choice is the label, where that carries
            a loss.
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


def dynamic_weights(confidence: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """D-PACE: weights of a block's positions that follow what limits acceptance now (arXiv 2605.18810, eq. 7 to 9).

    With q_i the drafter's probability of the label at position i and q~_i = (1 - ALPHA) q_i + ALPHA, the weight of
    position j is the sum over m >= j of the product over i <= m of q~_i: without smoothing, the derivative of the
    expected accepted length with respect to log q_j. Labels that do not count are passed by, with weight 0. Weights
    carry no gradient, and are not divided by their sum: their size is part of the objective.

    Args:
        confidence (`torch.Tensor`): The drafter's probability of each label `[..., K]`.
        counts (`torch.Tensor`): `[..., K]` bool, False for labels that do not count.

    Example:
    ```python
    >>> import torch
    >>> from hf_domino.training.objective.losses import dynamic_weights
    >>> dynamic_weights(torch.tensor([0.5, 0.0, 1.0]), torch.tensor([True, True, True]))
    tensor([1.5000, 0.7500, 0.3750])

    ```
    """
    smooth = torch.where(counts, torch.lerp(confidence, torch.ones_like(confidence), ALPHA), 1.0)
    accepted = smooth.cumprod(dim=-1) * counts
    return accepted.flip(-1).cumsum(dim=-1).flip(-1) * counts


def corrected_positions(config: DominoConfig, device: torch.device) -> torch.Tensor:
    """Which positions of a block are corrected, `[K]` bool; base logits are final at the others."""
    return torch.arange(config.block_size, device=device) >= config.label_offset + config.pure_draft_prefix_len


def draft_logits(
    drafter: DominoDraftModel,
    target: TargetModel,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    is_corrected: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Base and corrected logits of some positions.

    Args:
        drafter (`DominoDraftModel`): For the correction head.
        target (`TargetModel`): For lm_head.
        hidden (`torch.Tensor`): Draft hidden states `[..., H]`.
        states (`torch.Tensor`, *optional*): The head's states `[..., G]`; None without a correction head.
        is_corrected (`torch.Tensor`): `[...]` bool, from [`corrected_positions`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both `[..., D]` in fp32; the same tensor without a correction head.
    """
    base = drafter.logits(target, hidden).float()
    head = drafter.head
    if head is None or states is None:
        return base, base
    activated = head.activate(head.project_hidden(hidden), states) * is_corrected[..., None]
    return base, head.correct(target, base, activated)


@torch.no_grad()
def teach(vocabulary: DraftVocabulary, target: TargetModel, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities `[M, D]` in fp32, and their entropy in nats `[M]`, of its last states `[M, H]`."""
    log_probs = F.log_softmax(vocabulary.logits(target, final).float(), dim=-1)
    probs = log_probs.exp()
    return probs, log_probs.mul_(probs).sum(dim=-1).neg()


class LeanCrossEntropy(torch.autograd.Function):
    """Cross-entropies `[M]` in a third of autograd's passes over `[M, D]`, with a gradient in place; used once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Of logits `[M, D]`, and labels `[M]` or probabilities `[M, D]`; keeps the log-probabilities."""
        log_probs = F.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probs, expected)
        if expected.ndim == 1:
            return log_probs.gather(1, expected[:, None])[:, 0].neg()
        return (log_probs * expected).sum(dim=-1).neg()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Probabilities less what was expected, times `gradient` `[M]`."""
        log_probs, expected = ctx.saved_tensors
        probs = log_probs.exp_()
        if expected.ndim == 1:
            probs.scatter_add_(1, expected[:, None], probs.new_full((len(expected), 1), -1.0))
        else:
            probs.sub_(expected)
        return probs.mul_(gradient[:, None]), None
