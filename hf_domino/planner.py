"""When speculation pays: tokens per round, speed-up, best length, break-even acceptance.

`survival[k]` is the probability that proposals 0 to k are all accepted, as measured by
`drafter.stats.acceptance_rate_at`. With one acceptance probability a, survival is a, a^2, ..., and tokens per round are
E = (1 - a^(k+1)) / (1 - a) ([arXiv 2211.17192](https://arxiv.org/abs/2211.17192), section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

__all__ = [
    "Costs", "Plan", "Round", "alpha_for", "conclusions", "expected_tokens", "make_plan", "survival_from",
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


@dataclass(frozen=True)
class Costs:
    """What a round costs, in seconds.

    A DFlash drafter has `draft` alone, ours also `rollout`. A sequential one that takes the share c of a plain token
    has a `rollout` of c * `plain`, and with `verify` = `plain` the textbook's speed-up E / (1 + k c).

    Args:
        plain (`float`): One token of the target alone.
        verify (`float`): Verification of one position.
        verify_slope (`float`, *optional*, defaults to 0): Verification of each further position.
        draft (`float`, *optional*, defaults to 0): The backbone, once per round.
        rollout (`float`, *optional*, defaults to 0): The sequential part of the drafter, per proposal.
    """

    plain: float
    verify: float
    verify_slope: float = 0.0
    draft: float = 0.0
    rollout: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf or (value == 0 and name in ("plain", "verify")):
                raise ValueError(f"{name} must be a finite time, 0 or more (plain and verify above 0), got {value}.")

    def of_round(self, length: int) -> float:
        """Return the seconds of a round with `length` proposals; 0 is one plain token."""
        drafted = self.draft + self.verify + length * (self.rollout + self.verify_slope)
        return drafted if length else self.plain


@dataclass(frozen=True)
class Round:
    """What one number of proposals gives.

    Args:
        length (`int`): Proposals per round; 0 is plain decoding.
        tokens (`float`): Expected tokens per round, bonus included.
        seconds (`float`): Time of a round.
        tokens_per_second (`float`): `tokens` over `seconds`.
        speed_up (`float`): Over plain decoding.
        break_even (`float`, *optional*): Acceptance probability at which the round is as fast as plain decoding; 0.0 if
            it is faster even where nothing is accepted, None for plain decoding, and if it is slower even where
            everything is.
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
    """

    costs: Costs
    rounds: tuple[Round, ...]
    best_length: int

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
    rounds = []
    for length, tokens in enumerate(accumulate(survival, initial=1.0)):
        seconds = costs.of_round(length)
        even = alpha_for(seconds / costs.plain, length) if length else None
        rounds.append(Round(length, tokens, seconds, tokens / seconds, tokens * (costs.plain / seconds), even))
    gains = [entry.speed_up for entry in rounds]
    return Plan(costs, tuple(rounds), gains.index(max(gains)))


def conclusions(plan: Plan) -> list[str]:
    """Say in sentences what is best, and from which acceptance on.

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
    return [best, even]


def _proposals(entry: Round) -> str:
    return f"{entry.length} proposal{'' if entry.length == 1 else 's'}"
