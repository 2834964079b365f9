"""Learning from the target's whole law of the next token beside the one token that the text holds.

loss = (1 - weight) CE(label) + weight D, where D is T^2 KL(target || drafter) with both laws at temperature T (arXiv
1503.02531, whose factor T^2 keeps the size of the gradients), or their total variation, which is the share of drafts
that verification rejects at that temperature (arXiv 2211.17192). The law of the token at position p is the target's
after position p - 1; with a draft vocabulary, that of its tokens, renormalised.

Shapes: B batch, S sequence length, N blocks per row, K block size, M scored positions, H hidden size, D tokens that are
drafted, all of the target's or fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hf_domino._common.refusal import refusal
from hf_domino.kinds.view import block_positions
from hf_domino.target.view import TargetModel

# Rounding of one product in 16 bits; a state that was not normed, or normed twice, is off by far more.
SAME_LOGITS_TOL = 0.05
DIVERGENCES = ("kl", "tv")


@dataclass(frozen=True)
class TaughtLaw:
    """The target's law of the next token.

    Args:
        probs (`torch.Tensor`): `[M, D]` fp32.
        entropy (`torch.Tensor`): Its entropy in nats `[M]`, which no drafter's cross-entropy with it goes below.
    """

    probs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class Distillation:
    """How much is learned from the target's law, and at which temperature.

    Args:
        weight (`float`): Share of the cross-entropy that the divergence replaces, in [0, 1].
        temperature (`float`): By which the logits of target and drafter are divided.
        divergence (`str`): `"kl"` or `"tv"`, total variation.
    """

    weight: float
    temperature: float = 1.0
    divergence: str = "kl"

    def teach(self, logits: torch.Tensor) -> TaughtLaw:
        """The target's law, from its logits `[M, D]`."""
        log_probs = F.log_softmax(self._tempered(logits.float()), dim=-1)
        probs = log_probs.exp()
        return TaughtLaw(probs, log_probs.mul_(probs).sum(dim=-1).neg())

    def mix(self, cross_entropy: torch.Tensor, logits: torch.Tensor, taught: TaughtLaw) -> torch.Tensor:
        """The loss of each position.

        Args:
            cross_entropy (`torch.Tensor`): `[M]`, with the labels.
            logits (`torch.Tensor`): The drafter's `[M, D]`.
            taught (`TaughtLaw`): From [`~Distillation.teach`].

        Returns:
            `torch.Tensor`: `[M]` fp32.
        """
        drafted = self._tempered(logits)
        if self.divergence == "tv":
            divergence = (drafted.softmax(dim=-1) - taught.probs).abs().sum(dim=-1) / 2
        else:
            crossed = _LeanCrossEntropyOfLaws.apply(drafted, taught.probs)
            divergence = (crossed - taught.entropy) * self.temperature**2
        if self.weight == 1:  # no passes over the logits for a gradient that counts nothing
            return divergence
        return torch.lerp(cross_entropy, divergence, self.weight)

    def _tempered(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits at this temperature; no copy of them at 1."""
        return logits if self.temperature == 1 else logits / self.temperature


class _LeanCrossEntropyOfLaws(torch.autograd.Function):
    """-sum taught log drafted `[M]` in a third of the passes over `[M, D]` that autograd would make; used once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        """Of logits and probabilities, both `[M, D]`; keeps log-probabilities and probabilities."""
        log_probs = F.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probs, taught)
        return (log_probs * taught).sum(dim=-1).neg()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The difference of the two laws, times `gradient` `[M]`."""
        log_probs, taught = ctx.saved_tensors
        return log_probs.exp_().sub_(taught).mul_(gradient[:, None]), None


def gather_final(final: torch.Tensor, anchors: torch.Tensor, block_size: int, label_offset: int) -> torch.Tensor:
    """Final hidden states from which the target predicts the labels of block positions.

    Args:
        final (`torch.Tensor`): `[B, S, H]`.
        anchors (`torch.Tensor`): `[B, N]`.
        block_size (`int`): Positions of a block (K).
        label_offset (`int`): As in the drafter's configuration: 0 if position k predicts the token after it.

    Returns:
        `torch.Tensor`: `[B, N, K, H]`; of some position of the row where a label is outside the sequence.
    """
    positions = (block_positions(anchors, block_size) - label_offset).clamp(0, final.shape[1] - 1)
    rows = torch.arange(len(final), device=final.device)
    return final[rows[:, None, None], positions]


def check_final(target: TargetModel, final: torch.Tensor, logits: torch.Tensor) -> None:
    """Refuse a target whose last hidden state is not what its lm_head reads.

    Args:
        target (`TargetModel`): The target.
        final (`torch.Tensor`): Its last hidden state `[B, S, H]`.
        logits (`torch.Tensor`): Its own logits `[B, 1, V]` at the last position.

    Raises:
        ValueError: If lm_head makes other logits of it, or the forward's own are not finite.
    """
    expected, found = logits[:, -1].float(), target.logits(final[:, -1])
    if not torch.isfinite(expected).all():
        remedy = "Load it in a wider dtype (--target_dtype float32), or leave out the text it fails on."
        raise refusal("the target's logits of its first batch", "finite", "nan or inf", remedy)
    distance = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    if not distance <= SAME_LOGITS_TOL:
        family = getattr(target.text_config, "model_type", type(target.model).__name__)
        raise refusal(
            f"lm_head of the last hidden state of {family}", "the logits of its forward",
            f"a relative difference of {distance:.2g}",
            "This family's law cannot be read from it: set distillation_weight to 0.",
        )  # fmt: skip
