"""The ways of proposing, chains and trees: what each brings and costs, and which brings more in the same time.

Branches bring tokens where a chain would have ended, and cost positions of a verification. What both are worth goes by
drafter, text and machine. So both take turns for a while, and later the other way gets a turn now and then.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from hf_domino.decoding.pacing.estimates import HICCUP, RoundCost, Tokens

FIRST_ROUNDS = 24  # of chains: in a short text there is nothing to win
TURNS = 48  # rounds that both ways share then
EACH = 2  # rounds of a turn: a way's own price is learnt between two of them
AGAIN = 64  # rounds from one turn of the other way to the next
RECENT = 48  # comparisons that count


@dataclass
class Way:
    """A way of proposing: what its rounds bring and cost."""

    tokens: Tokens = field(default_factory=Tokens)
    cost: RoundCost = field(default_factory=RoundCost)

    @property
    def price(self) -> float:
        """Tokens that the time of one more proposal is worth, in rounds or in single steps; 0 before it is known."""
        return self.cost.slope * max(self.tokens.mean, self.cost.typical) if self.tokens.num_rounds else 0.0


class Contest:
    """Whether trees bring more tokens than chains in the same time.

    Times are compared between a round and the next, tokens within a tree: what its likeliest path promises alone is
    what a chain would.
    """

    def __init__(self) -> None:
        self._num_rounds = 0
        self._costs: deque[float] = deque(maxlen=RECENT)  # logarithms: of a tree's round in a chain's
        self._gains: deque[float] = deque(maxlen=RECENT)  # and of a tree's tokens in those of its likeliest path
        self._before: tuple[bool, float] | None = None  # the round before: whether of trees, and its seconds

    @property
    def prefers_trees(self) -> bool:
        """Whether trees have won, of late; not before both have had their turns."""
        if self._num_rounds < FIRST_ROUNDS + TURNS or not (self._costs and self._gains):
            return False
        return statistics.fmean(self._gains) > statistics.median(self._costs)

    def wants_trees(self) -> bool:
        """Whether the next round is to propose trees."""
        turn = self._num_rounds - FIRST_ROUNDS
        if turn < TURNS:
            return turn >= 0 and turn // EACH % 2 == 1
        return self.prefers_trees != (turn % AGAIN < EACH)

    def observe(self, has_trees: bool, seconds: float | None, gain: float | None) -> None:
        """Count a round, its wall time if that is typical, and what its trees promise in tokens of a chain."""
        self._num_rounds += 1
        if gain is not None:
            self._gains.append(math.log(gain))
        before, self._before = self._before, None if seconds is None else (has_trees, max(seconds, 1e-9))
        if before is not None and self._before is not None and before[0] != has_trees:
            ratio = math.log(self._before[1] / before[1])
            self._costs.append(min(max(ratio if has_trees else -ratio, -HICCUP), HICCUP))

    def part(self) -> None:
        """The next round is no neighbour of the last one."""
        self._before = None
