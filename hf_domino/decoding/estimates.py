"""Estimates from rounds: how likely proposals are accepted, and what each arm costs in plain decode steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from hf_domino.decoding.round import STEP, Arm

FIRST_RATE = 0.75  # acceptance of a drafter that fits
MEMORY = 0.98  # a round: text changes within some 50 of them
# The cost of a round in plain decode steps before any time was measured: with a draft, with prompt lookup, and for each
# proposal on top. No round costs less than one with prompt lookup.
NOMINAL_ROUND = 1.4
NOMINAL_LOOKUP = 1.1
NOMINAL_PROPOSAL = 0.03
PRIOR_ERROR = 0.4  # of the logarithm of that, of all arms alike: machines differ by factors of one and a half
# Of logarithms of times, a round: drift of the machine's pace and of an arm's own cost, and noise.
PACE_DRIFT = 0.05
COST_DRIFT = 0.015
NOISE = 0.1
SURPRISE = 2.5  # standard deviations; what is beyond is the machine's hiccup, or a jump


class Acceptance:
    """The chance that a proposal of a class is accepted once all before it are.

    Where no first guesses are given, classes are the positions of a chain: one that was hardly reached is taken for one
    like that before it, so that a short chain learns from long ones.

    Args:
        size (`int`): Classes.
        guesses (`Callable`, *optional*): Gives first guesses of all, for a lift as in `rates`; each counts like one
            proposal.
    """

    def __init__(self, size: int, guesses: Callable[[float], Sequence[float]] | None = None):
        self._guesses = guesses
        self._accepted = [0.0] * size
        self._seen = [0.0] * size
        self._expected: dict[float, list[float]] = {}  # tokens by lift, then by length, until more is known
        if guesses is None and size:
            self._accepted[0], self._seen[0] = FIRST_RATE, 1.0

    def rates(self, lift: float = 0.0) -> list[float]:
        """Acceptance rates, each of a chain raised by so many standard deviations."""
        # What is guessed is lifted once more.
        guesses = self._guesses and self._guesses(lift and lift + 1)
        rates = list[float]()
        rate = FIRST_RATE
        for position, (accepted, seen) in enumerate(zip(self._accepted, self._seen, strict=True)):
            # The first position of chains stands alone: old observations lose weight, and are not forgotten.
            weight = 1.0 if guesses or position else 1e-6
            count = seen + weight
            rate = (accepted + weight * (guesses[position] if guesses else rate)) / count
            if lift and not guesses:
                variance = (rate * (1 - rate) + 0.25 / (count + 1)) / (count + 1)
            else:
                variance = 0.0
            rates.append(min(max(rate + lift * math.sqrt(variance), 0.0), 1.0))
        return rates

    def tokens(self, length: int, lift: float = 0.0) -> float:
        """Tokens that a round of so many positions is expected to emit, per sequence."""
        if not length:
            return 1.0
        if lift not in self._expected:
            self._expected[lift] = list(accumulate(accumulate(self.rates(lift), mul), initial=1.0))
        return self._expected[lift][length]

    def forget(self) -> None:
        """A round is over: the rates stay as they were, and count less."""
        self._accepted = [MEMORY * count for count in self._accepted]
        self._seen = [MEMORY * count for count in self._seen]
        self._expected.clear()

    def observe(self, kinds: Sequence[int], num_accepted: int) -> None:
        """Learn from one row's round: its proposals' classes, up to the first rejected one."""
        for index, kind in enumerate(kinds[: num_accepted + 1]):
            self._accepted[kind] += index < num_accepted
            self._seen[kind] += 1
        self._expected.clear()


class Costs:
    """Cost of each arm in plain decode steps: a Kalman filter over logarithms of times.

    The pace of the machine is one state, which scales all times. Every arm has another one for its departure from its
    nominal cost. A plain decode step has none, so it shows the pace alone. An outlier counts only as far as it is
    credible. An outlier of a plain decode step makes all costs as uncertain as at first, because the pace may have been
    taken for a cost, or a cost for the pace.

    Args:
        arms (`Sequence[Arm]`): All but the plain decode step.
        like ([`Costs`], *optional*): Of batches of another size, whose costs are the first guess.
    """

    def __init__(self, arms: Sequence[Arm], like: Costs | None = None):
        self._places = {arm: place for place, arm in enumerate(arms, start=1)}  # of their states
        count = len(arms) + 1
        self._means: list[float] = [0.0] * count if like is None else [0.0, *like._means[1:]]
        self.num_readings = dict.fromkeys((STEP, *arms), 0)
        self._covariance = [
            [PRIOR_ERROR**2 + NOISE**2 * (row == column) for column in range(count)] for row in range(count)
        ]
        self._covariance[0] = [100.0] + [0.0] * (count - 1)
        for row in self._covariance[1:]:
            row[0] = 0.0

    @staticmethod
    def nominal(arm: Arm, num_proposals: int) -> float:
        """Cost of a round before it is known."""
        if not num_proposals:
            return 1.0
        return (NOMINAL_LOOKUP if arm.is_lookup else NOMINAL_ROUND) + NOMINAL_PROPOSAL * num_proposals

    def of(self, arm: Arm, num_proposals: int) -> float:
        """Cost of a round of this arm, in plain decode steps."""
        place = self._places.get(arm)
        if place is None:
            return 1.0
        return max(self.nominal(arm, num_proposals) * math.exp(self._means[place]), NOMINAL_LOOKUP)

    def standard_error(self, arm: Arm) -> float:
        """Standard error of the logarithm of an arm's cost."""
        place = self._places[arm]
        return math.sqrt(max(self._covariance[place][place], 0.0))

    def observe(self, arm: Arm, num_proposals: int, seconds: float) -> None:
        """Learn from a round's wall time."""
        covariance = self._covariance
        places = [0]
        if arm is not STEP:
            places.append(self._places[arm])
        self.num_readings[arm] += 1
        covariance[0][0] += PACE_DRIFT**2
        for each in self._places.values():
            covariance[each][each] += COST_DRIFT**2
        seen = [sum(row[place] for place in places) for row in covariance]
        expected = sum(self._means[place] for place in places)
        total = sum(seen[place] for place in places) + NOISE**2
        innovation = math.log(max(seconds, 1e-9) / self.nominal(arm, num_proposals)) - expected
        bound = SURPRISE * math.sqrt(total)
        surprises = abs(innovation) > bound
        innovation = min(max(innovation, -bound), bound)
        self._means = [mean + each / total * innovation for mean, each in zip(self._means, seen, strict=True)]
        self._covariance = [
            [value - first * second / total for value, second in zip(row, seen, strict=True)]
            for row, first in zip(covariance, seen, strict=True)
        ]
        if arm is STEP and surprises:
            self.num_readings[STEP] = 1
            for row in self._covariance[1:]:
                row[1:] = [value + PRIOR_ERROR**2 for value in row[1:]]
