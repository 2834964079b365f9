"""The base-anchored loss: cross-entropy of the corrected and of the base logits.

L = (1 - lambda_base) CE(corrected) + lambda_base CE(base). Each CE is a weighted sum over one global batch, divided by
the sum of the weights, and lambda_base falls linearly from 1 to 0 (arXiv 2605.29707). Without a correction head, L is
CE(base). With a draft vocabulary, both CE are over its tokens, and labels that are not among them carry no loss.

With distillation, each CE(label) becomes (1 - weight) CE(label) + weight D, where D is KL(target || drafter) (arXiv
1503.02531). For the token at position p, the target's distribution is the one after position p - 1; with a draft
vocabulary, it is renormalised over the tokens of that vocabulary.

Shapes: N blocks, K block size, M of their positions, H hidden size, G width of a head's state, D drafted tokens (all of
the target's or fewer).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.vocabulary import DraftVocabulary
from hf_domino.targets.view import TargetModel


class ScoredBlocks(NamedTuple):
    """Blocks, and everything that scoring their positions needs.

    Args:
        hidden (`torch.Tensor`): Draft hidden states `[N, K, H]`.
        states (`torch.Tensor`, *optional*): The head's states at these positions `[N, K, G]`; None without a head.
        labels (`torch.Tensor`): Columns of the labels `[N, K]` int64; -1 if the draft vocabulary lacks the label. Such
            a label counts as a miss, but carries no loss.
        weights (`torch.Tensor`): `[N, K]` fp32, 0 where a label does not count.
        final (`torch.Tensor`, *optional*): The target's final hidden states `[N, K, H]` one position before the labels,
            for distillation.
    """

    hidden: torch.Tensor
    states: torch.Tensor | None
    labels: torch.Tensor
    weights: torch.Tensor
    final: torch.Tensor | None = None

    def split(self, size: int) -> list[ScoredBlocks]:
        """Split into pieces of at most `size` blocks."""
        count = -(-len(self.labels) // size)
        pieces = [(None,) * count if value is None else value.split(size) for value in self]
        return [ScoredBlocks(*piece) for piece in zip(*pieces, strict=True)]


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
        is_base_correct (`torch.Tensor`): The same for the base logits. While gradients are computed, it is `is_correct`
            itself, which saves a pass over the logits.
    """

    loss: torch.Tensor
    base: torch.Tensor
    corrected: torch.Tensor
    is_correct: torch.Tensor
    is_base_correct: torch.Tensor


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
    >>> from hf_domino.training.objective.losses import lambda_base_at
    >>> [lambda_base_at(step, 100, 0.5) for step in (0, 25, 50, 99)]
    [1.0, 0.5, 0.0, 0.0]

    ```
    """
    if decay_ratio <= 0:
        return 0.0
    return start * max(0.0, 1.0 - step / max(decay_ratio * num_steps, 1))


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
    >>> from hf_domino.training.objective.losses import dynamic_weights
    >>> dynamic_weights(torch.tensor([0.5, 0.0, 1.0]), torch.tensor([True, True, True]))
    tensor([1.5000, 0.7500, 0.3750])

    ```
    """
    smooth = torch.where(counts, torch.lerp(confidence, torch.ones_like(confidence), ALPHA), 1.0)
    accepted = smooth.cumprod(dim=-1) * counts
    return accepted.flip(-1).cumsum(dim=-1).flip(-1) * counts


def corrected_positions(config: DominoConfig, device: torch.device) -> torch.Tensor:
    """Return which positions of a block the head corrects, `[K]` bool; the others keep their base logits."""
    return torch.arange(config.block_size, device=device) >= config.label_offset + config.pure_draft_prefix_len


def draft_logits(
    drafter: DominoDraftModel,
    target: TargetModel,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    is_corrected: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the base and the corrected logits of some positions.

    Args:
        drafter (`DominoDraftModel`): The drafter, for its correction head.
        target (`TargetModel`): The target, for its lm_head.
        hidden (`torch.Tensor`): Draft hidden states `[..., H]`.
        states (`torch.Tensor`, *optional*): The head's states `[..., G]`; None without a correction head.
        is_corrected (`torch.Tensor`): `[...]` bool, from [`corrected_positions`].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both `[..., D]` in fp32; the same tensor twice without a correction head.
    """
    base = drafter.logits(target, hidden).float()
    head = drafter.head
    if head is None or states is None:
        return base, base
    activated = head.activate(head.project_hidden(hidden), states) * is_corrected[..., None]
    return base, head.correct(target, base, activated)


@torch.no_grad()
def teach(vocabulary: DraftVocabulary, target: TargetModel, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the target's fp32 probabilities `[M, D]` and their entropy `[M]` in nats, from final states `[M, H]`."""
    log_probs = F.log_softmax(vocabulary.logits(target, final).float(), dim=-1)
    probs = log_probs.exp()
    return probs, log_probs.mul_(probs).sum(dim=-1).neg()


class LeanCrossEntropy(torch.autograd.Function):
    """Cross-entropy with a third of autograd's passes over the logits.

    It keeps the log-probabilities `[M, D]`, and the backward pass turns them into the gradient in place, so it can run
    only once.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Return losses `[M]` of logits `[M, D]`, given labels `[M]` or probabilities `[M, D]`."""
        log_probs = F.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probs, expected)
        if expected.ndim == 1:
            return log_probs.gather(1, expected[:, None])[:, 0].neg()
        return (log_probs * expected).sum(dim=-1).neg()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the probabilities minus the expected ones, times `gradient` `[M]`."""
        log_probs, expected = ctx.saved_tensors
        probs = log_probs.exp_()
        if expected.ndim == 1:
            probs.scatter_add_(1, expected[:, None], probs.new_full((len(expected), 1), -1.0))
        else:
            probs.sub_(expected)
        return probs.mul_(gradient[:, None]), None
