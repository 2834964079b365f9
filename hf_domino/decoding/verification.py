"""Verification: how many proposals are accepted, and what the target's own next token is.

The target's token at a position is the most likely one or, if the target samples, the one that the noise of the step
draws. Drafts were chosen with the same noise, and they are accepted as long as they equal the target's tokens. So the
text is the same as that of plain `generate`, with the same seed if it samples (arXiv 2408.07978). Greedy decoding is
the case without noise.

Shapes: R unfinished sequences, N proposals, W = N + 1 positions, C most proposals on a path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution, choose, sample
from hf_domino.decoding.tree import Tree


@dataclass(frozen=True)
class Verification:
    """The decision about a round's proposals, and the scores that it was made with."""

    scores: torch.Tensor  # the target's processed scores at the anchor's position and at each node, [R, W, V]
    # Everything that the host needs, in one tensor [R, 1 + C + 1], so that one transfer is enough: for each sequence,
    # the number of tokens to commit, and then these tokens, which are the accepted proposals and the bonus token. The
    # values after them are arbitrary. A number of 0 means that no token can be drawn.
    decided: torch.Tensor
    path: torch.Tensor | None = None  # the position that each token was chosen at, [R, C + 1]; None for a chain

    @property
    def tokens(self) -> torch.Tensor:
        """The accepted proposals and the bonus token, `[R, C + 1]`."""
        return self.decided[:, 1:]


def accept(
    distribution: TokenDistribution,
    prefixes: Prefixes,
    proposals: Tree,
    logits: torch.Tensor,  # [R, W, V]
    noise: torch.Tensor | None,  # noise of the steps from the anchor's on, [R, C + 1, V] or more steps; None for greedy
) -> Verification:
    """Accept proposals by the target's logits, without a host synchronisation."""
    scores = distribution.scores(prefixes, logits, lambda: proposals.seen_by(prefixes))
    # Both are [R, W]. Nodes on wrong branches get tokens as well, which are ignored.
    values, chosen = (None, choose(scores)) if noise is None else proposals.sample(scores, noise)
    if not proposals.num_nodes:
        counts = torch.ones_like(chosen) if values is None else (values == values).to(chosen.dtype)  # no NaN
        return Verification(scores, torch.cat((counts, chosen), dim=1))
    if distribution.constraints:
        proposals = _without_unanswerable(distribution, prefixes, proposals)
    accepted, path = proposals.accepted(chosen)
    if path is not None:
        chosen = chosen.gather(1, path)
        if values is not None:
            values = values.gather(1, path)
    counts = accepted + 1
    if values is not None:  # only accepted positions count: after a text's end, it can be impossible to draw a token
        counts = counts * (values.isnan().cumsum(dim=1).gather(1, accepted) == 0)
    return Verification(scores, torch.cat((counts, chosen), dim=1), path)


def _without_unanswerable(distribution: TokenDistribution, prefixes: Prefixes, proposals: Tree) -> Tree:
    """Remove the proposals after which a caller's function has no answer, by setting their tokens to -1.

    If the target itself chooses such a token, it becomes the bonus token, the last one of the round. The next round
    then calls the function after it, as plain generation does, unless the text ends there.
    """
    lacking = torch.tensor(
        distribution.unanswerable(prefixes, proposals.seen_by(prefixes)), device=proposals.tokens.device
    )
    is_node_lacking = lacking.view(len(proposals.tokens), -1)[:, 1:]  # [R, N]
    return replace(proposals, tokens=proposals.tokens.masked_fill(is_node_lacking, -1))


def take(scores: torch.Tensor, noise: torch.Tensor | None, index: int = 0) -> torch.Tensor:
    """Take the token `[R, 1]` at position `index` from its scores `[R, 1, V]`, given the noise of all positions."""
    if noise is None:
        return choose(scores)
    values, tokens = sample(scores, noise[:, index : index + 1])
    check_drawn(not bool(values.isnan().any()))
    return tokens


def check_drawn(is_drawn: bool) -> None:
    """Raise an error if no token can be drawn, as `torch.multinomial` does."""
    if not is_drawn:
        raise RuntimeError(
            "No token can be drawn: the target's processed scores are NaN or infinite, or all tokens are forbidden. "
            "generate fails here without a drafter, too; look at the logits processors, or run the target in bfloat16 "
            "or float32 if it overflows."
        )
