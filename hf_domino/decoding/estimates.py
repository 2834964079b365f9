"""Estimates from rounds: how likely proposals are accepted, and what each arm costs in plain decode steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from hf_domino.decoding.round import STEP, Arm

FIRST_RATE = 0.75  # the acceptance rate of a drafter that fits its target
MEMORY = 0.98  # the share of their weight that observations keep per round, because text changes within about 50 rounds
# The cost of a round, in plain decode steps, before any time is measured: of a round with a draft, of a round with
# prompt lookup, and the additional cost of each proposal. No round with proposals costs less than NOMINAL_LOOKUP.
NOMINAL_ROUND = 1.4
NOMINAL_LOOKUP = 1.1
NOMINAL_PROPOSAL = 0.03
# The standard error of the logarithm of these costs. All arms share it, because machines differ by factors of 1.5.
PRIOR_ERROR = 0.4
# The standard error of how fast that logarithm grows with the logarithm of the number of proposals. Machines differ in
# it, too, so rounds of two widths also tell what a third one costs. It is counted from MIDDLE_WIDTH on.
SLOPE_ERROR = 0.2
MIDDLE_WIDTH = 8
# Standard deviations of the logarithm of times, per round: the drift of the machine's pace, the drift of an arm's own
# cost, and the noise.
PACE_DRIFT = 0.05
COST_DRIFT = 0.015
NOISE = 0.1
SURPRISE = 2.5  # standard deviations; a time that is further off is an outlier, or the pace has jumped


class Acceptance:
    """The chance that a proposal of each class is accepted, given that all proposals before it are.

    Without first guesses, the classes are the positions of a chain. A position that was hardly ever reached is then
    assumed to be like the position before it, so chains that are longer than those tried so far have an estimate, too.

    Args:
        size (`int`): Number of classes.
        guesses (`Callable`, *optional*): Returns first guesses for all classes, given a lift as in `rates`. A guess has
            the weight of one observed proposal.
    """

    def __init__(self, size: int, guesses: Callable[[float], Sequence[float]] | None = None):
        self._guesses = guesses
        self._accepted = [0.0] * size
        self._seen = [0.0] * size
        self._expected: dict[float, list[float]] = {}  # cached results of `tokens`, by lift and then by length
        if guesses is None and size:
            self._accepted[0], self._seen[0] = FIRST_RATE, 1.0

    def rates(self, lift: float = 0.0) -> list[float]:
        """The acceptance rates of all classes; those of chains are raised by `lift` standard deviations."""
        # Guesses are lifted by one standard deviation more.
        guesses = self._guesses and self._guesses(lift and lift + 1)
        rates = list[float]()
        rate = FIRST_RATE
        for position, (accepted, seen) in enumerate(zip(self._accepted, self._seen, strict=True)):
            # The first position of a chain has none before it to fall back on. A tiny weight keeps its estimate at the
            # observed rate, even when old observations have lost most of their weight.
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
        """How many tokens a round with `length` proposals is expected to emit, per sequence."""
        if not length:
            return 1.0
        if lift not in self._expected:
            self._expected[lift] = list(accumulate(accumulate(self.rates(lift), mul), initial=1.0))
        return self._expected[lift][length]

    def forget(self) -> None:
        """Reduce the weight of all observations at the end of a round. The rates themselves stay as they are."""
        self._accepted = [MEMORY * count for count in self._accepted]
        self._seen = [MEMORY * count for count in self._seen]
        self._expected.clear()

    def observe(self, kinds: Sequence[int], num_accepted: int) -> None:
        """Learn from the round of one sequence, given the classes of its proposals and how many were accepted."""
        for index, kind in enumerate(kinds[: num_accepted + 1]):
            self._accepted[kind] += index < num_accepted
            self._seen[kind] += 1
        self._expected.clear()


class Costs:
    """The cost of each arm in plain decode steps, estimated by a Kalman filter over the logarithms of times.

    One state of the filter is the pace of the machine, which scales all times. Every arm has one more state, for the
    deviation from its nominal cost. A plain decode step has no such state, so it measures the pace alone. An outlier is
    clipped to `SURPRISE` standard deviations. After an outlier of a plain decode step, all costs become as uncertain as
    at first, because the filter may have confused the pace with the costs.

    Medians of the last 15 times of each arm are plainer, and were tried instead. In simulated rounds of recorded texts,
    they were as fast on average, within one percent. But if one round in seven takes several times as long as it
    should, as in `tests/decoding/test_policy.py`, they can pause a good drafter for a whole text. It then has 1.02
    times the speed of plain generation, where the filter reaches 1.6 or more.

    Args:
        arms (`Sequence[Arm]`): All arms except the plain decode step.
        like ([`Costs`], *optional*): The costs of batches of another size, which serve as the first guess.
    """

    def __init__(self, arms: Sequence[Arm], like: Costs | None = None):
        self._places = {arm: place for place, arm in enumerate(arms, start=1)}  # index of each arm's state
        count = len(arms) + 1
        self._means: list[float] = [0.0] * count if like is None else [0.0, *like._means[1:]]
        self.num_readings = dict.fromkeys((STEP, *arms), 0)
        widths = [MIDDLE_WIDTH if arm.is_lookup else arm.width for arm in arms]  # prompt lookup has no width of its own
        slopes = [0.0, *(SLOPE_ERROR * math.log(width / MIDDLE_WIDTH) for width in widths)]
        self._covariance = [
            [PRIOR_ERROR**2 + slopes[row] * slopes[column] + NOISE**2 * (row == column) for column in range(count)]
            for row in range(count)
        ]
        self._covariance[0] = [100.0] + [0.0] * (count - 1)
        for row in self._covariance[1:]:
            row[0] = 0.0

    @staticmethod
    def nominal(arm: Arm, num_proposals: int) -> float:
        """The cost of a round of this arm before any is measured, in plain decode steps."""
        if not num_proposals:
            return 1.0
        return (NOMINAL_LOOKUP if arm.is_lookup else NOMINAL_ROUND) + NOMINAL_PROPOSAL * num_proposals

    def of(self, arm: Arm, num_proposals: int) -> float:
        """The estimated cost of a round of this arm, in plain decode steps."""
        place = self._places.get(arm)
        if place is None:
            return 1.0
        return max(self.nominal(arm, num_proposals) * math.exp(self._means[place]), NOMINAL_LOOKUP)

    def standard_error(self, arm: Arm) -> float:
        """The standard error of the logarithm of an arm's cost."""
        place = self._places[arm]
        return math.sqrt(max(self._covariance[place][place], 0.0))

    def observe(self, arm: Arm, num_proposals: int, seconds: float) -> None:
        """Learn from the wall time of a round."""
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
