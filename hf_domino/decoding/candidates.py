"""Candidate pools: drafts are chosen among the most likely tokens of each position instead of the whole vocabulary.

A correction reorders the likely tokens, but it hardly ever makes an unlikely token the best one. So only the tokens
with the highest base logits are corrected. The pool already considers logits processors, as far as they can be applied
in advance: a token that they force is a candidate, and a token that they forbid is not. Drafts change slightly, but the
output does not.

Shapes: B sequences, P proposals, M candidates per position, D tokens of the draft vocabulary (all V of the target or
fewer).
"""

from __future__ import annotations

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors import CHECKS_DISTRIBUTION, PREFIX_FREE
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.scores import Scores
from hf_domino.methods import DominoDraftModel

EXACT_POOL_SIZE = 128  # candidates per depth of a tree if `draft_pool_size` is None, with which chains use all tokens


def pool_columns(
    base_logits: torch.Tensor,
    size: int,
    distribution: TokenDistribution,
    prefixes: Prefixes,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose the candidates of each position, the most likely tokens; returns their columns `[B, P, M]`.

    Args:
        base_logits (`torch.Tensor`): Base logits `[B, P, D]`.
        size (`int`): Number of candidates per position (M).
        distribution ([`TokenDistribution`]): The distribution that drafts are chosen from. It must pass [`fits_pool`].
        prefixes ([`Prefixes`]): The tokens so far of the B sequences.
        noise (`torch.Tensor`, *optional*): The noise that drafts are drawn with, `[B, P, D]`.
    """
    likely = base_logits
    if lifting := [effect for effect in distribution.effects if effect.may_lift]:
        foreseen = Scores(distribution.vocabulary.scatter(base_logits).flatten(0, 1), base_logits.dtype)
        known = prefixes.foreseen(base_logits.shape[1])
        for effect in lifting:
            effect.apply(foreseen, known)
        likely = distribution.vocabulary.gather(foreseen.tensor).view_as(base_logits)
    if noise is not None:
        # An unlikely token can only be drawn if its noise favours it, so such tokens move up. Tokens that the noise
        # does not favour keep their scores, because top-k and top-p depend on the likely tokens.
        likely = likely.float() / distribution.temperature + noise.clamp_max(1.0).log().neg()
    return likely.topk(size, dim=2).indices


def fits_pool(distribution: TokenDistribution) -> bool:
    """Whether a distribution can be computed for a few candidates alone."""
    if distribution.effects and any(type(processor) in CHECKS_DISTRIBUTION for processor in distribution.processors):
        return False
    return len(distribution.effects) == sum(type(processor) not in PREFIX_FREE for processor in distribution.processors)


def pool_size(drafter: DominoDraftModel, distribution: TokenDistribution, is_tree: bool) -> int | None:
    """The number of candidates per depth; None if drafts must be chosen among all tokens.

    Args:
        drafter ([`DominoDraftModel`]): The drafter, whose configuration can set `draft_pool_size`.
        distribution ([`TokenDistribution`]): The distribution that drafts are chosen from.
        is_tree (`bool`): Whether the drafts form a tree, for which all tokens would be too many candidates.
    """
    size = drafter.config.draft_pool_size or (EXACT_POOL_SIZE if is_tree else None)
    return size if fits_pool(distribution) else None
