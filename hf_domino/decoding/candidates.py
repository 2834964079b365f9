"""Candidate pools: drafts chosen among the likeliest tokens of each position instead of the whole vocabulary.

A correction moves the likely tokens among each other; it hardly ever lifts one from far below. So only the tokens with
the highest base logits are corrected, as far as is known by what the draft distribution makes of these: a token it
forces is among them, one it forbids is not. Drafts change a little, the output does not.

Shapes: B rows, P proposals, M candidates per position, D tokens that are drafted, all V of the target or fewer.
"""

from __future__ import annotations

from functools import partial

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors import CHECKS_DISTRIBUTION, PREFIX_FREE
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.scores import CandidateScores, Scores
from hf_domino.methods import DominoDraftModel

EXACT_POOL_SIZE = 128  # candidates of a tree's depth where chains are chosen from the whole vocabulary


class CandidatePool:
    """The candidates of one block, and what the draft distribution makes of their logits.

    Args:
        base_logits (`torch.Tensor`): `[B, P, D]`.
        size (`int`): Candidates per position (M), the likeliest.
        distribution ([`TokenDistribution`]): What drafts are chosen from, which must pass [`fits_pool`].
        prefixes ([`Prefixes`]): Tokens so far of the B rows.
        noise (`torch.Tensor`, *optional*): What drafts are drawn with, `[B, P, D]` or of more positions.
    """

    def __init__(
        self,
        base_logits: torch.Tensor,
        size: int,
        distribution: TokenDistribution,
        prefixes: Prefixes,
        noise: torch.Tensor | None = None,
    ):
        self._distribution = distribution
        self._prefixes = prefixes
        self._vocab_size = distribution.vocabulary.total(base_logits.shape[2])
        likely = base_logits
        if lifting := [effect for effect in distribution.effects if effect.may_lift]:
            foreseen = Scores(distribution.vocabulary.scatter(base_logits).flatten(0, 1), base_logits.dtype)
            known = prefixes.foreseen(base_logits.shape[1])
            for effect in lifting:
                effect.apply(foreseen, known)
            likely = distribution.vocabulary.gather(foreseen.tensor).view_as(base_logits)
        if noise is not None:
            # An unlikely token can be drawn only if its noise favours it; what noise does not favour counts as it is,
            # because top-k and top-p go by the likely ones.
            favour = noise[:, : likely.shape[1]].clamp_max(1.0).log().neg()
            likely = likely.float() / distribution.temperature + favour
        self.columns = likely.topk(size, dim=2).indices  # [B, P, M]
        self.token_ids = distribution.vocabulary.ids(self.columns)
        self.logits = base_logits.gather(2, self.columns)

    def scores(self, logits: torch.Tensor, proposals: torch.Tensor) -> torch.Tensor:
        """Process the logits of the candidates behind some proposals, in fp32.

        Args:
            logits (`torch.Tensor`): `[B, M]`, or `[B * L, M]` of L branches of each row.
            proposals (`torch.Tensor`): `[B, N]`, or `[B * L, N]`.
        """
        if not self._distribution.effects:
            return self._distribution.process(logits, self._prefixes)
        branches = len(proposals) // len(self.token_ids)
        changeable = partial(
            CandidateScores,
            vocab_size=self._vocab_size,
            token_ids=self.token_ids[:, proposals.shape[1]].repeat_interleave(branches, dim=0),
        )
        return self._distribution.process(logits, self._prefixes.branches(branches).along(proposals, 1), changeable)


def fits_pool(distribution: TokenDistribution) -> bool:
    """Whether a distribution can be applied to a few candidates alone."""
    if distribution.effects and any(type(processor) in CHECKS_DISTRIBUTION for processor in distribution.processors):
        return False
    return len(distribution.effects) == sum(type(processor) not in PREFIX_FREE for processor in distribution.processors)


def pool_size(drafter: DominoDraftModel, distribution: TokenDistribution, is_tree: bool) -> int | None:
    """Candidates of each depth; None for all tokens, where the draft distribution or the configuration wants it.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        distribution ([`TokenDistribution`]): What drafts are chosen from.
        is_tree (`bool`): Whether branches branch, for which all tokens would be too many.
    """
    size = drafter.config.draft_pool_size or (EXACT_POOL_SIZE if is_tree else None)
    return size if fits_pool(distribution) else None
