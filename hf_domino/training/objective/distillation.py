"""Learning from the target's whole distribution of the next token beside the one token that the text holds.

loss = (1 - weight) CE(label) + weight D, where D is KL(target || drafter) (arXiv 1503.02531), or their total variation,
which is the share of drafts that verification rejects (arXiv 2211.17192). The distribution of the token at position p
is the target's after position p - 1; with a draft vocabulary, that of its tokens, renormalised.

Shapes: B batch, S sequence length, N blocks per row, K block size, M scored positions, H hidden size, D tokens that are
drafted, all of the target's or fewer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_domino._common.refusal import refusal
from hf_domino.kinds.view import block_positions
from hf_domino.target.view import TargetModel

# Rounding of one product in 16 bits; a state that was not normed, or normed twice, is off by far more.
SAME_LOGITS_TOL = 0.05
PROBED_TOKENS = 8  # the first ones of the vocabulary
DIVERGENCES = ("kl", "tv")


def teach(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's probabilities `[M, D]` in fp32, and their entropy in nats `[M]`, of its logits `[M, D]`."""
    log_probs = F.log_softmax(logits.float(), dim=-1)
    probs = log_probs.exp()
    return probs, log_probs.mul_(probs).sum(dim=-1).neg()


def divergences(
    logits: torch.Tensor, probs: torch.Tensor, entropy: torch.Tensor, divergence: str = "kl"
) -> torch.Tensor:
    """How far the drafter's logits `[M, D]` are from what [`teach`] gave, `[M]`: KL, or `"tv"` for total variation."""
    if divergence == "tv":
        return (logits.softmax(dim=-1) - probs).abs().sum(dim=-1) / 2
    return _LeanCrossEntropyOfProbs.apply(logits, probs) - entropy


class _LeanCrossEntropyOfProbs(torch.autograd.Function):
    """-sum taught log drafted `[M]` in a third of the passes over `[M, D]` that autograd would make; used once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        """Of logits and probabilities, both `[M, D]`; keeps log-probabilities and probabilities."""
        log_probs = F.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probs, taught)
        return (log_probs * taught).sum(dim=-1).neg()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The difference of the two distributions, times `gradient` `[M]`."""
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


@torch.no_grad()
def check_final(target: TargetModel) -> None:
    """Refuse a target whose last hidden state, over a few tokens, is not what its lm_head reads."""
    ids = torch.arange(PROBED_TOKENS, device=target.input_device)[None]
    outputs = target.model(input_ids=ids, use_cache=False, **target.capture_kwargs(final=True))
    expected, found = outputs.logits.float(), target.logits(outputs.hidden_states[-1].to(outputs.logits.device))
    if not torch.isfinite(expected).all():
        remedy = "Load it in a wider dtype (--target_dtype float32)."
        raise refusal("the target's logits", "finite", "nan or inf", remedy)
    distance = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    if not distance <= SAME_LOGITS_TOL:
        family = getattr(target.text_config, "model_type", type(target.model).__name__)
        raise refusal(
            f"lm_head of the last hidden state of {family}", "the logits of its forward",
            f"a relative difference of {distance:.2g}",
            "This family's distribution cannot be read from it: set distillation_weight to 0.",
        )  # fmt: skip
