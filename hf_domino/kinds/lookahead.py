"""Lookahead: no weights, but a pool of n-grams that the target has written or guessed (arXiv 2402.02057).

Of each first token it keeps the newest G of them. How the target comes to guess is in `decoding.lookahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_domino.kinds.kind import Table

NOTHING = -1  # where there is no n-gram yet


class Lookahead(Table):
    """Lookahead. The pool is `[V, G, n - 1]`: n-grams by their first token, without it, the newest first."""

    title = "lookahead"
    link = "[lookahead](https://arxiv.org/abs/2402.02057)"
    defaults = {"block_size": 16, "num_hidden_layers": 1, "draft_tree_size": 64}
    own = {"ngram_size": 5, "window_size": 7, "num_candidates": 7}  # as its authors begin

    def build(self) -> None:
        """See [`Kind`]."""
        size = self.config.vocab_size, self.config.num_candidates, self.config.ngram_size - 1
        self.drafter.ngrams = nn.Parameter(torch.full(size, NOTHING, dtype=torch.int32), requires_grad=False)


def remember(drafter: Any, ngrams: Sequence[Sequence[int]]) -> None:
    """Put n-grams into the pool, in place of the oldest ones; the last is the newest."""
    pool, firsts = drafter.ngrams, list(dict.fromkeys(first for first, *_ in ngrams))
    kept = dict(zip(firsts, pool[firsts].tolist(), strict=True))
    for first, *rest in ngrams:
        kept[first] = [rest, *(other for other in kept[first] if other != rest)][: pool.shape[1]]
    if kept:
        pool[firsts] = torch.tensor(list(kept.values()), dtype=pool.dtype, device=pool.device)


def begun_with(drafter: Any, firsts: Sequence[int]) -> list[list[list[int]]]:
    """N-grams of the pool behind each of these first tokens, the newest first."""
    return [[rest for rest in each if rest[0] != NOTHING] for each in drafter.ngrams[list(firsts)].tolist()]
