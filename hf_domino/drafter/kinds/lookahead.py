"""Lookahead: no weights, but a pool of n-grams that the target has written or guessed (arXiv 2402.02057).

Of each first token it keeps the newest G of them. How the target comes to guess is in `decoding.lookahead`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_domino.drafter.kinds.tables import TableKind

NOTHING = -1  # where there is no n-gram yet


class LookaheadKind(TableKind):
    """Lookahead. The pool is `[V, G, n - 1]`: what stands behind each first token, the newest first."""

    def build(self) -> None:
        """See [`Kind`]."""
        ((_, size),) = self.config.kind.shapes(self.config).items()
        self.drafter.ngrams = nn.Parameter(torch.full(size, NOTHING, dtype=torch.int32), requires_grad=False)


def remember(drafter: Any, ngrams: Sequence[Sequence[int]]) -> None:
    """Put n-grams into the pool, in place of the oldest ones; the last is the newest.

    Args:
        drafter (`DominoDraftModel`): Of this kind.
        ngrams (`Sequence[Sequence[int]]`): Tokens of each.
    """
    pool, firsts = drafter.ngrams, list(dict.fromkeys(first for first, *_ in ngrams))
    kept = dict(zip(firsts, pool[firsts].tolist(), strict=True))
    for first, *rest in ngrams:
        kept[first] = [rest, *(other for other in kept[first] if other != rest)][: pool.shape[1]]
    if kept:
        pool[firsts] = torch.tensor(list(kept.values()), dtype=pool.dtype, device=pool.device)


def begun_with(drafter: Any, firsts: Sequence[int]) -> list[list[list[int]]]:
    """What the pool has behind each of these tokens, the newest first.

    Args:
        drafter (`DominoDraftModel`): Of this kind.
        firsts (`Sequence[int]`): First tokens.
    """
    return [[rest for rest in each if rest[0] != NOTHING] for each in drafter.ngrams[list(firsts)].tolist()]
