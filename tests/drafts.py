"""Drafts behind given draft hidden states, without a call of `generate` around them."""

from __future__ import annotations

import torch

from hf_domino.decoding.branches import Branches, draft_distribution
from hf_domino.methods.scorer import Drafted


def branches_of(drafter, target, hidden, prefixes, distribution, noise=None, scorer=None, is_tree=False) -> Branches:
    """The branches of a round, of a scorer without a table of input products unless one is given."""
    scorer = scorer or drafter.scorer(target, reads_host=False)
    scorer.begin(Drafted(hidden, prefixes.last()))
    return Branches(scorer, prefixes, draft_distribution(scorer, distribution), noise, is_tree=is_tree)


def chain_of(*arguments, **options) -> torch.Tensor:
    """A chain of proposals, `[B, P]`; the arguments are those of [`branches_of`]."""
    return branches_of(*arguments, **options).chain()
