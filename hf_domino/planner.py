"""When speculation pays: tokens per round, speed-up, best length, break-even acceptance, networks and trees.

Two lists say everything. `survival[k]` is the probability that proposals 0 to k are all accepted, as measured by
`drafter.stats.acceptance_rate_at`. `costs[k]` is the seconds of a round with k proposals; `costs[0]` is plain decoding,
one token. With one acceptance probability a, survival is a, a^2, ..., and tokens per round are
E = (1 - a^(k+1)) / (1 - a) ([arXiv 2211.17192](https://arxiv.org/abs/2211.17192), section 3).

A round accepts a node of a tree where it accepts the node's parent and the node is right, and siblings are never right
together. So a tree brings 1 + the sum of its nodes' chances; the likeliest first, they stand in for `survival`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

__all__ = [
    "Costs", "Plan", "Round", "alpha_for", "best_length", "break_even", "conclusions", "costs_by_width",
    "expected_tokens", "make_plan", "max_round_trip", "speed_ups", "survival_from", "tree_chances",
]  # fmt: skip
TOLERANCE = 1e-9  # rounding of means over rounds, which may make equal rates rise
HALVINGS = 60  # of [0, 1], beyond the digits of a float


def survival_from(rates: Sequence[float]) -> list[float]:
    """Turn conditional acceptance probabilities into survival: their running product.

    Args:
        rates (`Sequence[float]`): Probability, for each position, that its proposal is accepted if all before it were;
            `[alpha] * k` for one probability.

    Example:
    ```python
    >>> from hf_domino.planner import survival_from
    >>> survival_from([0.5] * 3)
    [0.5, 0.25, 0.125]

    ```
    """
    for position, rate in enumerate(rates):
        if not 0 <= rate <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {rate} at position {position}: give 0.8 for 80 %.")
    return list(accumulate(rates, mul))


def expected_tokens(survival: Sequence[float]) -> float:
    """Return the expected tokens of a round, bonus included: 1 + the sum of `survival`.

    Args:
        survival (`Sequence[float]`): As of [`survival_from`], or measured.
    """
    return 1.0 + math.fsum(survival)


def alpha_for(tokens: float, length: int) -> float | None:
    """Return the acceptance probability that gives so many tokens per round: the inverse of [`expected_tokens`].

    Args:
        tokens (`float`): Expected tokens of a round, bonus included.
        length (`int`): Proposals per round.

    Returns:
        `float`, *optional*: The probability; 0.0 if a round gives that many even where nothing is accepted, None if not
        even where everything is.
    """
    if tokens <= 1 or tokens > length + 1:
        return 0.0 if tokens <= 1 else None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if expected_tokens(survival_from([middle] * length)) < tokens:
            low = middle
        else:
            high = middle
    return high


def speed_ups(survival: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Return the speed-up over plain decoding by number of proposals, 1.0 for none.

    Args:
        survival (`Sequence[float]`): One entry per proposal.
        costs (`Sequence[float]`): Seconds of a round with 0, 1, ... proposals; `math.inf` for one that is not offered.

    Example:
    ```python
    >>> from hf_domino.planner import speed_ups
    >>> speed_ups([0.5, 0.25], [10.0, 12.0, 14.0])
    [1.0, 1.25, 1.25]

    ```
    """
    if len(costs) != len(survival) + 1:
        raise ValueError(f"costs must have {len(survival) + 1} entries, for 0 proposals on, got {len(costs)}.")
    return [tokens * (costs[0] / cost) for tokens, cost in zip(accumulate(survival, initial=1.0), costs, strict=True)]


def best_length(survival: Sequence[float], costs: Sequence[float]) -> int:
    """Return the number of proposals per round that is fastest; 0 is plain decoding, and of equals the shortest wins.

    Args:
        survival, costs (`Sequence[float]`): As of [`speed_ups`].
    """
    gains = speed_ups(survival, costs)
    return gains.index(max(gains))


@dataclass(frozen=True)
class Costs:
    """What a round costs, in seconds.

    A DFlash drafter has `draft` alone, ours also `rollout`. A sequential one that takes the share c of a plain token
    has a `rollout` of c * `plain`, and with `verify` = `plain` the textbook's speed-up E / (1 + k c). With drafter and
    target in separate pools a round also takes one network round trip, what it carries included.

    Args:
        plain (`float`): One token of the target alone.
        verify (`float`): Verification of one position.
        verify_slope (`float`, *optional*, defaults to 0): Verification of each further position.
        draft (`float`, *optional*, defaults to 0): The backbone, once per round.
        rollout (`float`, *optional*, defaults to 0): The sequential part of the drafter, per proposal.
        round_trip (`float`, *optional*, defaults to 0): Network latency, there and back.
    """

    plain: float
    verify: float
    verify_slope: float = 0.0
    draft: float = 0.0
    rollout: float = 0.0
    round_trip: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf or (value == 0 and name in ("plain", "verify")):
                raise ValueError(f"{name} must be a finite time, 0 or more (plain and verify above 0), got {value}.")

    def of_round(self, length: int) -> float:
        """Return the seconds of a round with `length` proposals; 0 is one plain token."""
        drafted = self.draft + self.verify + self.round_trip + length * (self.rollout + self.verify_slope)
        return drafted if length else self.plain

    def by_length(self, most: int) -> list[float]:
        """Return the seconds of a round with 0, 1, ... proposals, as [`best_length`] takes them."""
        return [self.of_round(length) for length in range(most + 1)]


def break_even(length: int, costs: Costs) -> float | None:
    """Return the acceptance probability at which a round of `length` proposals is as fast as plain decoding.

    Args:
        length (`int`): Proposals per round.
        costs ([`Costs`]): What a round costs.

    Returns:
        `float`, *optional*: The probability; 0.0 if the round is faster even where nothing is accepted, None if it is
        slower even where everything is.
    """
    return alpha_for(costs.of_round(length) / costs.plain, length)


def max_round_trip(survival: Sequence[float], costs: Costs) -> float | None:
    """Return the longest network round trip at which some length is still as fast as plain decoding.

    Args:
        survival (`Sequence[float]`): One entry per proposal.
        costs ([`Costs`]): What a round costs; its own `round_trip` does not matter.

    Returns:
        `float`, *optional*: Seconds; None if speculation does not pay without any round trip either.
    """
    near, tokens = replace(costs, round_trip=0.0), accumulate(survival, initial=1.0)
    longest = max(count * costs.plain - near.of_round(length) for length, count in enumerate(tokens) if length)
    return longest if longest >= 0 else None


@dataclass(frozen=True)
class Round:
    """What one number of proposals gives.

    Args:
        length (`int`): Proposals per round; 0 is plain decoding.
        tokens (`float`): Expected tokens per round, bonus included.
        seconds (`float`): Time of a round.
        tokens_per_second (`float`): `tokens` over `seconds`.
        speed_up (`float`): Over plain decoding.
        break_even (`float`, *optional*): As of [`break_even`]; None also for plain decoding.
    """

    length: int
    tokens: float
    seconds: float
    tokens_per_second: float
    speed_up: float
    break_even: float | None


@dataclass(frozen=True)
class Plan:
    """What speculation gives by number of proposals.

    Args:
        costs ([`Costs`]): What a round costs.
        rounds (`tuple[Round, ...]`): One entry for each of 0 to P proposals.
        best_length (`int`): The fastest; 0 is plain decoding.
        side_by_side_speed_up (`float`): Best speed-up without a network.
        max_round_trip (`float`, *optional*): As of [`max_round_trip`].
    """

    costs: Costs
    rounds: tuple[Round, ...]
    best_length: int
    side_by_side_speed_up: float
    max_round_trip: float | None

    @property
    def best(self) -> Round:
        """The fastest entry of `rounds`."""
        return self.rounds[self.best_length]


def make_plan(survival: Sequence[float], costs: Costs) -> Plan:
    """Work out what every number of proposals gives, and which is best.

    Args:
        survival (`Sequence[float]`): As of [`survival_from`], or measured; one entry per proposal.
        costs ([`Costs`]): What a round costs.

    Example:
    ```python
    >>> from hf_domino.planner import Costs, conclusions, make_plan, survival_from
    >>> plan = make_plan(survival_from([0.8] * 8), Costs(plain=0.010, draft=0.002, rollout=0.001, verify=0.013))
    >>> print(conclusions(plan)[0])
    Best: 7 proposals per round, 1.89 x plain decoding.

    ```
    """
    if not survival or not all(0 <= rate <= 1 for rate in survival):
        raise ValueError(f"acceptance_rate_at must be in [0, 1], one per proposal, got {list(survival)}.")
    for position, (before, rate) in enumerate(pairwise(survival), start=1):
        if rate > before + TOLERANCE:
            raise ValueError(
                f"acceptance_rate_at must not rise with the position, got {rate} at {position} after {before}. "
                "Conditional rates, among rounds that accepted all before, go to survival_from, or to --alpha."
            )
    seconds, tokens = costs.by_length(len(survival)), accumulate(survival, initial=1.0)
    rounds = tuple(
        Round(length, count, taken, count / taken, gain, break_even(length, costs) if length else None)
        for length, (count, taken, gain) in enumerate(zip(tokens, seconds, speed_ups(survival, seconds), strict=True))
    )
    side_by_side = speed_ups(survival, replace(costs, round_trip=0.0).by_length(len(survival)))
    return Plan(costs, rounds, best_length(survival, seconds), max(side_by_side), max_round_trip(survival, costs))


def conclusions(plan: Plan) -> list[str]:
    """Say in sentences what is best, from which acceptance on, and what the network does to it.

    Args:
        plan ([`Plan`]): As of [`make_plan`].
    """
    drafted = plan.rounds[1:]
    nearest = max(drafted, key=lambda entry: entry.speed_up)
    best = f"Best: {_proposals(nearest)} per round, {nearest.speed_up:.2f} x plain decoding."
    if not plan.best_length:
        best = f"Best: plain decoding; the nearest is {_proposals(nearest)} per round, {nearest.speed_up:.2f} x."
    reachable = [nearest] if plan.best_length else [entry for entry in drafted if entry.break_even is not None]
    easiest = min(reachable, key=lambda entry: entry.break_even or 0.0, default=None)
    even = "Break-even: none; even with everything accepted, a round is slower than plain decoding of its tokens."
    if easiest:
        even = (
            f"Break-even: with {_proposals(easiest)} it pays from acceptance probability {easiest.break_even:.2f} on; "
            f"here it is {alpha_for(easiest.tokens, easiest.length):.2f}."
        )
    limit = "no round trip is short enough"
    if plan.max_round_trip is not None:
        limit = f"it pays for round trips of up to {plan.max_round_trip * 1e3:.1f} ms"
    network = f"it leaves {plan.best.speed_up:.2f} x of {plan.side_by_side_speed_up:.2f} x on one machine; {limit}"
    if not plan.costs.round_trip:
        network = f"none; with drafter and target in separate pools {limit}"
    return [best, even, f"Network: {network}."]


def _proposals(entry: Round) -> str:
    return f"{entry.length} proposal{'' if entry.length == 1 else 's'}"


def tree_chances(shares: Sequence[Sequence[float]], num_nodes: int) -> list[float]:
    """Return the chances of the likeliest nodes, each with all before it on its path: the best tree of every size.

    Args:
        shares (`Sequence[Sequence[float]]`): For each depth, how often the likeliest candidate, the second one and so
            on is right if all before are; with one candidate a depth the tree is a chain.
        num_nodes (`int`): Most nodes; fewer are returned where there are not so many. The likeliest stands first.

    Example:
    ```python
    >>> from hf_domino.planner import tree_chances
    >>> tree_chances([[0.5, 0.25], [0.5, 0.25]], num_nodes=4)
    [0.5, 0.25, 0.25, 0.125]

    ```
    """
    for depth, ranks in enumerate(shares):
        if min(ranks, default=0) < 0 or math.fsum(ranks) > 1 + TOLERANCE or list(ranks) != sorted(ranks, reverse=True):
            raise ValueError(f"shares must be 0 or more, sum to 1 at most and not rise, got {ranks} at depth {depth}.")
    chances: list[float] = []
    nodes = [(-1.0, 0)]  # less the chance, and the depth of children; the anchor
    while nodes and len(chances) <= num_nodes:
        chance, depth = heapq.heappop(nodes)
        chances.append(-chance)
        for share in shares[depth] if depth < len(shares) else ():
            heapq.heappush(nodes, (chance * share, depth + 1))
    return chances[1:]


def costs_by_width(seconds: Mapping[int, float], num_nodes: int, drafting: float = 0.0) -> list[float]:
    """Return the seconds of a round with 0, 1, ... nodes, as `best_length` takes them, from a few measured widths.

    Args:
        seconds (`Mapping[int, float]`): Of a verification by its positions, the anchor's among them; 1, which is plain
            decoding, and `num_nodes + 1` or more must be there. What lies between two is on their line.
        num_nodes (`int`): Most nodes.
        drafting (`float`, *optional*, defaults to 0.0): Of the drafter, a round: to grow a tree takes a step a depth,
            whatever its width.
    """
    import numpy as np

    widths = sorted(seconds)
    if not widths or widths[0] != 1 or widths[-1] <= num_nodes:
        raise ValueError(f"seconds must have times of 1 and of {num_nodes + 1} or more positions, got {widths}.")
    times = np.interp(range(1, num_nodes + 2), widths, [seconds[width] for width in widths])
    return [seconds[1], *(times[1:] + drafting).tolist()]
