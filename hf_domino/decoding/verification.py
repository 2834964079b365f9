"""Verification: how many proposals are accepted, and the target's own next token.

A position's token is the likeliest one or, where the target samples, the one that its noise makes it draw. Drafts were
chosen under the same noise and are accepted while they are that token: the text is the one of plain `generate`, with
the same seed where it samples (arXiv 2408.07978). Greedy is the case without noise.

Shapes: B rows of the batch, R rows still generated, P proposals, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution, choose, sample
from hf_domino.decoding.tree import Tree


@dataclass(frozen=True)
class Verification:
    """What was decided on a round's proposals, and by which scores."""

    scores: torch.Tensor  # the target's, processed, of the anchor's position and each node's, [R, W, V]
    # Everything the host must know, to be read at once: of each row how many tokens are committed, then these, accepted
    # proposals and the bonus token, and anything behind them, [R, 1 + C + 1]. A count of 0 says that none can be drawn.
    decided: torch.Tensor
    path: torch.Tensor | None = None  # the position that each token was chosen at, [R, C + 1]; None for a chain

    @property
    def tokens(self) -> torch.Tensor:
        """Accepted proposals and the bonus token, `[R, C + 1]`."""
        return self.decided[:, 1:]


def accept(
    distribution: TokenDistribution,
    prefixes: Prefixes,
    proposals: Tree,
    logits: torch.Tensor,  # [R, W, V]
    noise: torch.Tensor | None,  # of the steps from the anchor's on, [R, C + 1, V] or more; None for the likeliest
) -> Verification:
    """Accept proposals by the target's logits, without a synchronisation."""
    scores = distribution.scores(prefixes, logits, lambda: proposals.seen_by(prefixes))
    # [R, W] both. Wrong branches have tokens too, which are passed over.
    values, chosen = (None, choose(scores)) if noise is None else proposals.sample(scores, noise)
    if not proposals.num_nodes:
        counts = torch.ones_like(chosen) if values is None else (values == values).to(chosen.dtype)  # no NaN
        return Verification(scores, torch.cat((counts, chosen), dim=1))
    accepted, path = _answered(distribution, prefixes, proposals).accepted(chosen)
    if path is not None:
        chosen = chosen.gather(1, path)
        if values is not None:
            values = values.gather(1, path)
    counts = accepted + 1
    if values is not None:  # what was drafted behind a text's end need not have a distribution
        counts = counts * (values.isnan().cumsum(dim=1).gather(1, accepted) == 0)
    return Verification(scores, torch.cat((counts, chosen), dim=1), path)


def _answered(distribution: TokenDistribution, prefixes: Prefixes, proposals: Tree) -> Tree:
    """Proposals, less those behind which a caller's function cannot tell what may follow.

    If such a token is the target's own, it is the last one of the round. The next round asks behind it as plain
    generation does, unless the text ends there.
    """
    if not distribution.constraints:
        return proposals
    lacking = torch.tensor(
        distribution.unanswered(prefixes, proposals.seen_by(prefixes)), device=proposals.tokens.device
    )
    is_node_lacking = lacking.view(len(proposals.tokens), -1)[:, 1:]  # [R, N]
    return replace(proposals, tokens=proposals.tokens.masked_fill(is_node_lacking, -1))


def take(scores: torch.Tensor, noise: torch.Tensor | None, index: int = 0) -> torch.Tensor:
    """Take the token `[R, 1]` at one position by its scores `[R, 1, V]`, with the noise of all positions."""
    if noise is None:
        return choose(scores)
    values, tokens = sample(scores, noise[:, index : index + 1])
    check_drawn(not bool(values.isnan().any()))
    return tokens


def check_drawn(is_drawn: bool) -> None:
    """Raise as `torch.multinomial` does where there is no distribution to draw from."""
    if not is_drawn:
        raise RuntimeError(
            "No token can be drawn: the target's processed scores are NaN or infinite, or all tokens are forbidden. "
            "generate fails here without a drafter, too; look at the logits processors, or run the target in bfloat16 "
            "or float32 if it overflows."
        )
