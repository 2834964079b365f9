"""Estimates from rounds: how likely proposals are accepted, and what each arm costs in single steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from hf_domino.decoding.round import STEP, Arm

# Acceptance.
FIRST_RATE, FIRST_WEIGHT = 0.75, 1.0  # of a drafter that fits, believed like so many proposals
MEMORY = 0.97  # a round: text changes within some 30 of them
BRANCHES_SAVE = 0.25  # share of a chain's rejections that a tree's branches avoid, before it is known
CLASS_WEIGHT, CLASS_MEMORY = 4.0, 0.98  # the same for classes of proposals, a proposal of its class
# Cost of a round in single steps, before the clock has been read.
NOMINAL_ROUND, NOMINAL_COPY, NOMINAL_PROPOSAL = 1.4, 1.1, 0.03
LEAST_COST = 1.1  # a round is a single step and more
SHARED_DOUBT, OWN_DOUBT = 0.25, 0.08  # of the logarithm of that, of all arms alike and of each alone
# Of logarithms of times, a round: drift of the machine's pace and of an arm's own cost, first and least noise.
PACE_DRIFT, COST_DRIFT, FIRST_NOISE, LEAST_NOISE = 0.05, 0.015, 0.1, 0.02
NOISE_RATE = 0.05  # share of the newest reading in the noise
SURPRISE = 2.5  # standard deviations; what is beyond is the machine's hiccup, or a jump


class ClassAcceptance:
    """The chance that a proposal of a class is accepted once all before it are.

    Args:
        guesses (`Iterable[float]`): First guess of it for each class.
    """

    def __init__(self, guesses: Iterable[float]):
        self._accepted = [CLASS_WEIGHT * chance for chance in guesses]
        self._seen = [CLASS_WEIGHT] * len(self._accepted)

    def rate(self, kind: int) -> float:
        """Acceptance rate of proposals of a class, in `[0, 1]`."""
        return self._accepted[kind] / self._seen[kind]

    def observe(self, kinds: Sequence[int], num_accepted: int) -> None:
        """Learn from one row's round: its proposals up to the first rejected one were looked at."""
        for position, kind in enumerate(kinds[: num_accepted + 1]):
            self._accepted[kind] = CLASS_MEMORY * self._accepted[kind] + (position < num_accepted)
            self._seen[kind] = CLASS_MEMORY * self._seen[kind] + 1


class PositionAcceptance:
    """The chance that a position's proposal is accepted once all before it are: a short chain learns from long ones.

    A position that was hardly reached is taken for one like that before it; a tree's for one of the chain's, in which
    branches save some.

    Args:
        length (`int`): Positions.
        chain ([`PositionAcceptance`], *optional*): Of chains, where this is of the trees beside them.
    """

    def __init__(self, length: int, chain: PositionAcceptance | None = None):
        self._chain = chain
        self._accepted, self._seen = [0.0] * length, [0.0] * length
        self._expected: dict[float, list[float]] = {}  # tokens by lift, then by length, until more is known
        if chain is None and length:
            self._accepted[0], self._seen[0] = FIRST_RATE * FIRST_WEIGHT, FIRST_WEIGHT

    def rates(self, lift: float = 0.0) -> list[float]:
        """Acceptance rates, each of a chain raised by so many standard deviations."""
        likes = [] if self._chain is None else self._chain.rates(lift)
        rates, rate = list[float](), FIRST_RATE
        for position, (accepted, seen) in enumerate(zip(self._accepted, self._seen, strict=True)):
            like = 1 - (1 - likes[position]) * (1 - BRANCHES_SAVE) if likes else rate
            # The first position of chains stands alone: what is long ago is doubted, and not forgotten.
            weight = FIRST_WEIGHT if likes or position else 1e-6
            count = seen + weight
            rate = (accepted + weight * like) / count
            deviation = math.sqrt((rate * (1 - rate) + 0.25 / (count + 1)) / (count + 1)) if lift and not likes else 0.0
            rates.append(min(max(rate + lift * deviation, 0.0), 1.0))
        return rates

    def tokens(self, length: int, lift: float = 0.0) -> float:
        """Tokens that a round of so many positions may be expected to bring, a row."""
        if not length:
            return 1.0
        if lift not in self._expected:
            self._expected[lift] = list(accumulate(accumulate(self.rates(lift), mul), initial=1.0))
        return self._expected[lift][length]

    def forget(self) -> None:
        """A round is over: what is known stays as it was, and is doubted more."""
        self._accepted = [MEMORY * count for count in self._accepted]
        self._seen = [MEMORY * count for count in self._seen]
        self._expected.clear()

    def observe(self, length: int, num_accepted: int) -> None:
        """Learn from one row's round of so many positions."""
        for position in range(min(num_accepted + 1, length)):
            self._accepted[position] += position < num_accepted
            self._seen[position] += 1
        self._expected.clear()


class Costs:
    """Cost of each arm in single steps: a Kalman filter over logarithms of times.

    The machine's pace is one state, by which all times vary, and every arm has one for how it departs from its nominal
    cost. A single step has none: it shows the pace alone. A time that surprises counts as far as it may be believed.

    Args:
        arms (`Sequence[Arm]`): All but the single step.
        is_known (`bool`, *optional*, defaults to `False`): Whether nominal costs stand.
        like ([`Costs`], *optional*): Of batches of another size, whose costs are the first guess.
    """

    def __init__(self, arms: Sequence[Arm], is_known: bool = False, like: Costs | None = None):
        self._places = {arm: place for place, arm in enumerate(arms, start=1)}
        count = len(arms) + 1
        self._means: list[float] = [0.0] * count if like is None else [0.0, *like._means[1:]]
        self.num_readings = dict.fromkeys((STEP, *arms), 0)
        shared, own = (0.0, 0.0) if is_known else (SHARED_DOUBT**2, OWN_DOUBT**2)
        self._covariance = [[shared + own * (row == column) for column in range(count)] for row in range(count)]
        self._covariance[0] = [100.0] + [0.0] * (count - 1)
        for row in self._covariance[1:]:
            row[0] = 0.0
        self._noise = FIRST_NOISE**2

    @staticmethod
    def nominal(arm: Arm, num_proposals: int) -> float:
        """Cost of a round before it is known."""
        if not num_proposals:
            return 1.0
        return (NOMINAL_COPY if arm.is_copied else NOMINAL_ROUND) + NOMINAL_PROPOSAL * num_proposals

    def of(self, arm: Arm, num_proposals: int) -> float:
        """Cost of a round of this arm, in single steps."""
        place = self._places.get(arm)
        if place is None:
            return 1.0
        return max(self.nominal(arm, num_proposals) * math.exp(self._means[place]), LEAST_COST)

    def doubt(self, arm: Arm, other: Arm) -> float:
        """Standard error of the logarithm of both costs' ratio."""
        first, second = self._places.get(arm), self._places.get(other)
        variance = self._between(first, first) + self._between(second, second) - 2 * self._between(first, second)
        return math.sqrt(max(variance, 0.0))

    def _between(self, first: int | None, second: int | None) -> float:
        """Covariance of two arms' states; a single step has none."""
        return self._covariance[first][second] if first and second else 0.0

    def observe(self, arm: Arm, num_proposals: int, seconds: float) -> bool:
        """Learn from a round's wall time; returns whether it surprised."""
        covariance, place = self._covariance, self._places.get(arm)
        self.num_readings[arm] += 1
        covariance[0][0] += PACE_DRIFT**2
        for each in self._places.values():
            covariance[each][each] += COST_DRIFT**2
        seen = [row[0] + (0.0 if place is None else row[place]) for row in covariance]
        known = seen[0] + (0.0 if place is None else seen[place])
        expected = self._means[0] + (0.0 if place is None else self._means[place])
        total = known + self._noise
        innovation = math.log(max(seconds, 1e-9) / self.nominal(arm, num_proposals)) - expected
        bound = SURPRISE * math.sqrt(total)
        surprises, innovation = abs(innovation) > bound, min(max(innovation, -bound), bound)
        self._means = [mean + each / total * innovation for mean, each in zip(self._means, seen, strict=True)]
        self._covariance = [
            [value - first * second / total for value, second in zip(row, seen, strict=True)]
            for row, first in zip(covariance, seen, strict=True)
        ]
        self._noise += NOISE_RATE * (innovation**2 - total) * self._noise / total
        self._noise = max(self._noise, LEAST_NOISE**2)
        return surprises
