"""Compare the distributions of the drafter with those of its target at each position of a block.

The drafter reads the true tokens before a position, so errors at earlier positions do not count at later ones.

Shapes: M positions of blocks, V vocabulary, D tokens of the draft vocabulary, R rounds, P proposals of a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

LEAST_LOG = -20.0  # log-probability of a token that the drafter rules out, which keeps the divergence finite
ROWS_AT_A_TIME = 64  # positions; with a large vocabulary, all probabilities at once would take much memory


class PositionFit(NamedTuple):
    """How close the drafter is to its target at one position of a block.

    Args:
        position (`int`): The position; 1 is the first proposal.
        top_1 (`float`): Share of rounds in which drafter and target have the same likeliest token.
        kl (`float`): Mean KL divergence, KL(target || drafter), in nats, over the tokens of the draft vocabulary. A
            token that the drafter rules out counts as one with a probability of 2e-9.
        total_variation (`float`): Mean total variation distance, which is the share of sampled proposals that an ideal
            verification would reject.
    """

    position: int
    top_1: float
    kl: float
    total_variation: float


def distances(target_logits: torch.Tensor, draft_logits: torch.Tensor, vocabulary: Any) -> torch.Tensor:
    """Return top-1 agreement, KL and total variation `[M, 3]` of logits `[M, V]` and `[M, D]`."""
    found = []
    pieces = zip(target_logits.split(ROWS_AT_A_TIME), draft_logits.split(ROWS_AT_A_TIME), strict=True)
    for own, drafted in pieces:
        own = own.to(drafted.device).float()
        log_q = drafted.float().log_softmax(dim=-1).clamp_min(LEAST_LOG)
        log_p = vocabulary.gather(own).log_softmax(dim=-1)
        p = vocabulary.gather(own.softmax(dim=-1))
        missing = 1 - p.sum(dim=-1)  # the target's tokens that are not in the draft vocabulary
        same = vocabulary.ids(log_q.argmax(dim=-1)) == own.argmax(dim=-1)
        # A token that the target rules out adds nothing.
        kl = (log_p.exp() * (log_p - log_q)).nan_to_num(0.0).sum(dim=-1)
        variation = ((p - log_q.exp()).abs().sum(dim=-1) + missing) / 2
        found.append(torch.stack((same.float(), kl, variation), dim=-1))
    return torch.cat(found)


def fit_by_position(texts: Sequence[torch.Tensor]) -> list[PositionFit]:
    """Average the distances `[R, P, 3]` of texts over all rounds; empty if no text was long enough."""
    measured = [text for text in texts if len(text)]
    if not measured:
        return []
    means = torch.cat(measured).mean(dim=0).tolist()
    return [PositionFit(position, *values) for position, values in enumerate(means, start=1)]
