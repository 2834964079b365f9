"""Block verification: how many proposals are accepted, decided for the block as a whole.

The rule for single tokens accepts each with min(1, p/q), and its first rejection ends the round. Here (arXiv
2403.10444, algorithm 2) a later token that q gave too seldom makes up for an earlier one that it gave too often. With
w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1), what is left behind i proposals is r_i = max(w_i p - q, 0), of mass
|r_i|. Those i stand with h_i = |r_i| / (|r_i| + 1 - w_i), all P of them with w_P, each count by a uniform of its own.
The longest run that stands is accepted, and the bonus token is drawn from its r_i, or from p behind all P.

So i proposals or more are accepted with w_i, never less than the product of min(1, p/q), and the text has the target's
law with rounds that know nothing of each other. How many are drafted may depend on those drafted before.
Here p is `target_probs`, q `draft_probs`.

Shapes: B batch, P proposals, V vocabulary.
"""

from __future__ import annotations

import torch


def accept_block(
    proposals: torch.Tensor, target_probs: torch.Tensor, draft_probs: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept as many leading proposals as losslessness allows, without a synchronisation.

    Args:
        proposals (`torch.Tensor`): `[B, P]`, drawn from `draft_probs`.
        target_probs (`torch.Tensor`): The target's law `[B, P + 1, V]`, for each proposal and after all.
        draft_probs (`torch.Tensor`): The law of the drafts `[B, P, V]`; one of certainty for a greedy draft.
        uniforms (`torch.Tensor`): `[B, P]` in `[0, 1)`, independent.

    Returns:
        `tuple`: `num_accepted` `[B]`, and the unnormalised law `[B, V]` of the bonus token.
    """
    rows, num_drafted = torch.arange(len(proposals), device=proposals.device), proposals.shape[1]
    # Nothing is drafted behind the last proposal: a row of zeros, behind which all of w_P p is left.
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    weights = prefix_weights(proposals, target_probs, draft_probs)
    residuals = (weights[..., None] * target_probs - padded).clamp_min(0.0)  # [B, P + 1, V]
    chances = standing_chances(weights, residuals.sum(dim=-1))
    lengths = torch.arange(1, num_drafted + 1, device=proposals.device)
    stands = torch.nn.functional.pad((uniforms < chances[:, 1:]) * lengths, (1, 0))  # no proposals always stand
    num_accepted = stands.amax(dim=1)
    residual, at_stop = residuals[rows, num_accepted], target_probs[rows, num_accepted]
    # p = q up to rounding leaves nothing: stopping here was rounding itself, and p is the law to draw from.
    return num_accepted, torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, at_stop)


def prefix_weights(proposals: torch.Tensor, target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """How probable `[B, P + 1]` it is that each count of leading proposals, or more, is accepted: w_0 to w_P."""
    index = proposals[..., None]
    target_at, draft_at = target_probs[:, :-1].gather(2, index)[..., 0], draft_probs.gather(2, index)[..., 0]
    ratios = (target_at / draft_at).nan_to_num(nan=0.0)  # a row of NaN is no law: nothing from it on is accepted
    # The product held at 1 from above is a walk of logarithms, less how far its highest point so far is above 0.
    walk = torch.nn.functional.pad(ratios.log().cumsum(dim=1), (1, 0))
    return (walk - walk.cummax(dim=1).values).exp()


def standing_chances(weights: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """How probable `[B, P + 1]` it is that proposals stand, if no longer run of them does: h_0 to h_P.

    Args:
        weights (`torch.Tensor`): w_0 to w_P, `[B, P + 1]`.
        left (`torch.Tensor`): The mass of what is left behind each, `[B, P + 1]`.
    """
    left = torch.where(left.isnan(), weights, left)  # behind the text's end: no law, nothing is accepted there
    return (left / (left + (1 - weights))).nan_to_num(nan=1.0)  # 0 / 0: p = q and w = 1, a longer run stands anyway
