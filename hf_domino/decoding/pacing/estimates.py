"""Estimates from rounds: how likely proposals are accepted, what rounds bring, and what they cost in single steps.

The machine's other work makes durations vary by factors, and by the same ones for what is done at the same time. So a
round is compared with the single step beside it, a round with the round before it, and never one time with another.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence

# Confidence of the draft law in its likeliest token; between two edges, one acceptance rate is learnt.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_ROUNDS = 4.0  # weight of the first guess
PRIOR_BY_POSITION = 0.8
MEMORY = 0.98  # of acceptance, a proposal of its class
RECENT_ROUNDS = 48  # whose tokens and lengths count
LATEST_ROUNDS, HABIT_ROUNDS = 12, 6  # of those, the last ones say how the text is now; all count as so many of them
PRIOR_SQUARES = 6.0  # added to those of tokens about their mean: a few rounds may all be alike by chance
# Cost of a round in single steps, before the clock has been read and as one reading beside those of the clock.
NOMINAL_ROUND, NOMINAL_PROPOSAL = 1.4, 0.03
LEAST_COST = 1.1  # a round is a single step and more
RECENT_PAIRS = 16  # of a round and a single step beside it
HICCUP = 0.4  # logarithm of how much longer one of two rounds takes; what is beyond is the machine's doing
MAX_SLOPE = 0.2  # of a round's time, one proposal more
PRIOR_LENGTHS = 50.0  # weight of the first guess of it, in squared differences of lengths
SURE_BY = 1.0  # standard errors by which rounds must bring too little, and cost too much, before drafting pauses


class Acceptance:
    """The chance that a proposal is accepted once all before it are, by what was known when it was drafted.

    Args:
        guesses (`Iterable[float]`): First guess of it for each class of proposals.
    """

    def __init__(self, guesses: Iterable[float]):
        self._accepted = [PRIOR_ROUNDS * chance for chance in guesses]
        self._seen = [PRIOR_ROUNDS] * len(self._accepted)

    @classmethod
    def by_confidence(cls) -> Acceptance:
        """Classes of the draft law's confidence, between `EDGES`, which is believed at first."""
        return cls((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))

    @classmethod
    def by_position(cls, num_positions: int) -> Acceptance:
        """Each position of a block is a class."""
        return cls([PRIOR_BY_POSITION] * num_positions)

    @property
    def num_kinds(self) -> int:
        """Classes of proposals."""
        return len(self._seen)

    def chance(self, kind: int) -> float:
        """Acceptance rate of proposals of a class, in `[0, 1]`."""
        return self._accepted[kind] / self._seen[kind]

    @property
    def typical(self) -> float:
        """Acceptance rate of all proposals that were looked at."""
        return sum(self._accepted) / sum(self._seen)

    def observe(self, kinds: Sequence[int], num_accepted: int) -> None:
        """Learn from one row's round: its proposals up to the first rejected one were looked at."""
        for position, kind in enumerate(kinds[: num_accepted + 1]):
            self.add(kind, position < num_accepted)

    def add(self, kind: int, share: float) -> None:
        """Learn from one proposal: 1 if it was accepted, 0 if not, or what share it had in that."""
        self._accepted[kind] = MEMORY * self._accepted[kind] + share
        self._seen[kind] = MEMORY * self._seen[kind] + 1


class Tokens:
    """Tokens that recent rounds brought."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._recent: deque[float] = deque(maxlen=RECENT_ROUNDS)

    @property
    def last(self) -> float:
        """Tokens of the last round; 0 without one."""
        return self._recent[-1] if self._recent else 0.0

    @property
    def mean(self) -> float:
        """Tokens of recent rounds; 0 without one."""
        return statistics.fmean(self._recent) if self._recent else 0.0

    @property
    def expected(self) -> float:
        """Tokens of the next round: what rounds brought of late, not without what they did before."""
        latest, weight = list(self._recent)[-LATEST_ROUNDS:], min(len(self._recent), HABIT_ROUNDS)
        return (weight * self.mean + sum(latest)) / (weight + len(latest)) if latest else 0.0

    @property
    def most(self) -> float:
        """Tokens that rounds may well bring, as far as one can be sure; of at least one round."""
        count, mean = len(self._recent), self.mean
        variance = (sum((tokens - mean) ** 2 for tokens in self._recent) + PRIOR_SQUARES) / count
        return self.expected + SURE_BY * math.sqrt(variance / (min(count, HABIT_ROUNDS) + min(count, LATEST_ROUNDS)))

    def observe(self, num_tokens: float) -> None:
        """Count a round and the tokens it committed, the mean of its rows."""
        self.num_rounds += 1
        self._recent.append(num_tokens)


class RoundCost:
    """Cost of a round in single steps, and a proposal more of a round: nominal, until neighbours have been timed."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=RECENT_ROUNDS)
        self._ratios: deque[float] = deque(maxlen=RECENT_PAIRS)  # of a round and the single step beside it
        self._differences: deque[tuple[int, float]] = deque(maxlen=RECENT_ROUNDS)  # between a round and the next
        self._before: tuple[int, float] | None = None  # proposals and seconds of what was timed last

    @property
    def num_pairs(self) -> int:
        """Rounds that were compared with the single step beside them, of late."""
        return len(self._ratios)

    @property
    def nominal(self) -> float:
        """Cost of rounds as long as recent ones, before it is known."""
        return NOMINAL_ROUND + NOMINAL_PROPOSAL * (statistics.fmean(self._lengths) if self._lengths else 0.0)

    @property
    def typical(self) -> float:
        """Cost of a round: the median reading."""
        return statistics.median_low([*self._ratios, self.nominal])

    @property
    def least(self) -> float:
        """Cost that a round has at least, as far as one can be sure: a reading below the median, whatever their law."""
        readings = sorted([*self._ratios, self.nominal])
        return readings[int((len(readings) - SURE_BY * math.sqrt(len(readings))) / 2)]

    @property
    def slope(self) -> float:
        """Share of a round's cost that one proposal more adds."""
        squares = sum(longer**2 for longer, _ in self._differences)
        products = sum(longer * later for longer, later in self._differences)
        guess = PRIOR_LENGTHS * NOMINAL_PROPOSAL / self.nominal
        return min(max((products + guess) / (squares + PRIOR_LENGTHS), 0.0), MAX_SLOPE)

    def observe(self, num_proposed: int, seconds: float | None) -> None:
        """Count a round of so many proposals per row, or a single step, and its wall time if that is typical."""
        if num_proposed:
            self._lengths.append(num_proposed)
        before, self._before = self._before, None if seconds is None else (num_proposed, max(seconds, 1e-9))
        if before is None or self._before is None:
            return
        longer, ratio = num_proposed - before[0], self._before[1] / before[1]
        if num_proposed and before[0]:
            most = HICCUP + MAX_SLOPE * abs(longer)
            self._differences.append((longer, min(max(math.log(ratio), -most), most)))
        elif num_proposed or before[0]:
            self._ratios.append(max(ratio if num_proposed else 1 / ratio, LEAST_COST))
            self._before = None  # each duration counts in one comparison

    def part(self) -> None:
        """Compare the next time with none before it."""
        self._before = None
