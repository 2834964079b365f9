"""The plan: what speculation gives by number of proposals, from `formulas`'s formulas, and what follows.

`measured` reads the rows of a benchmark, `cli` is `hf-domino plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hf_domino.planner.formulas import Costs, alpha_for, best_length, break_even, max_round_trip, speed_ups

RATE_TOL = 1e-9  # rounding of means over rounds, which may make equal rates rise


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
        costs (`Costs`): What a round was taken to cost.
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
        costs (`Costs`): What a round costs.

    Raises:
        ValueError: If `survival` is empty, leaves [0, 1] or rises.

    Example:
    ```python
    >>> from hf_domino.planner import make_plan
    >>> from hf_domino.planner import Costs, survival_from
    >>> plan = make_plan(survival_from([0.8] * 8), Costs(plain=0.010, draft=0.002, rollout=0.001, verify=0.013))
    >>> plan.best_length, round(plan.best.speed_up, 2)
    (7, 1.89)

    ```
    """
    check_survival(survival)
    seconds = costs.by_length(survival)
    gains = speed_ups(survival, seconds)
    rounds = tuple(
        Round(length, tokens, cost, tokens / cost, gain, break_even(length, costs) if length else None)
        for length, (tokens, cost, gain) in enumerate(
            zip(accumulate(survival, initial=1.0), seconds, gains, strict=True)
        )
    )
    side_by_side = speed_ups(survival, costs.side_by_side().by_length(survival))
    best = best_length(survival, seconds)
    return Plan(costs, rounds, best, max(side_by_side), max_round_trip(survival, costs))


def check_survival(survival: Sequence[float]) -> None:
    """Refuse rates that no sequence of accepted prefixes can have.

    Args:
        survival (`Sequence[float]`): Probability, for each position, that all proposals up to it are accepted.

    Raises:
        ValueError: If there are none, one is outside [0, 1], or they rise with the position.
    """
    if not survival:
        raise ValueError("acceptance_rate_at must have at least one entry, one per proposal, got none.")
    for position, rate in enumerate(survival):
        if not 0 <= rate <= 1:
            raise ValueError(f"acceptance_rate_at must be in [0, 1], got {rate} at {position}: give 0.8 for 80 %.")
    for position, (before, rate) in enumerate(pairwise(survival), start=1):
        if rate > before + RATE_TOL:
            raise ValueError(
                f"acceptance_rate_at must not rise with the position, got {rate} at {position} after {before}: a "
                "proposal is accepted only if all before it were. Rates among rounds that accepted all before are "
                "conditional: they go to survival_from, on the command line to --alpha."
            )


def conclusions(plan: Plan) -> list[str]:
    """Say in sentences what is best, from which acceptance on, and what the network does to it.

    Args:
        plan (`Plan`): As of [`make_plan`].

    Example:
    ```python
    >>> from hf_domino.planner import conclusions, make_plan
    >>> from hf_domino.planner import Costs
    >>> for sentence in conclusions(make_plan([0.8, 0.6], Costs(plain=0.010, draft=0.002, verify=0.013))):
    ...     print(sentence)
    Best: 2 proposals per round, 1.60 x plain decoding.
    Break-even: with 2 proposals it pays from acceptance probability 0.37 on; here it is 0.78.
    Network: none; with drafter and target in separate pools it pays for round trips of up to 9.0 ms.

    ```
    """
    return [_best_sentence(plan), _break_even_sentence(plan), _network_sentence(plan)]


def _best_sentence(plan: Plan) -> str:
    if plan.best_length:
        return f"Best: {_proposals(plan.best_length)} per round, {plan.best.speed_up:.2f} x plain decoding."
    nearest = max(plan.rounds[1:], key=lambda entry: entry.speed_up)
    return f"Best: plain decoding; the nearest is {_proposals(nearest.length)} per round, {nearest.speed_up:.2f} x."


def _break_even_sentence(plan: Plan) -> str:
    """Of the best length; where that is plain decoding, of the length that needs the least acceptance."""
    reachable = [entry for entry in plan.rounds[1:] if entry.break_even is not None]
    if not reachable:
        return "Break-even: none; even with everything accepted, a round is slower than plain decoding of its tokens."
    entry = plan.best if plan.best_length else min(reachable, key=lambda entry: entry.break_even or 0.0)
    if not entry.break_even:
        return (
            f"Break-even: with {_proposals(entry.length)} it pays whatever is accepted, as a round takes no longer "
            "than a plain token. Are both times of one target, machine and way to generate?"
        )
    return (
        f"Break-even: with {_proposals(entry.length)} it pays from acceptance probability {entry.break_even:.2f} on; "
        f"here it is {alpha_for(entry.tokens, entry.length):.2f}."
    )


def _network_sentence(plan: Plan) -> str:
    on_one_machine = f"{plan.side_by_side_speed_up:.2f} x on one machine"
    if plan.side_by_side_speed_up <= 1:
        return "Network: nothing to lose; speculation does not pay on one machine either."
    if plan.max_round_trip is None:
        limit = "no round trip is short enough, as sending features and proposals takes longer than is gained"
    else:
        limit = f"it pays for round trips of up to {plan.max_round_trip * 1e3:.1f} ms"
    if plan.costs == plan.costs.side_by_side():
        return f"Network: none; with drafter and target in separate pools {limit}."
    if plan.best_length:
        return f"Network: it leaves {plan.best.speed_up:.2f} x of {on_one_machine}; {limit}."
    nearest = max(entry.speed_up for entry in plan.rounds[1:])
    return f"Network: it eats the gain; {on_one_machine} becomes {nearest:.2f} x, slower than plain decoding; {limit}."


def _proposals(length: int) -> str:
    return f"{length} proposal{'' if length == 1 else 's'}"
