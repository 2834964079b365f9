"""When speculation pays: tokens per round, speed-up, best length, break-even acceptance, and what a network may cost.

Two lists say everything. `survival[k]` is the probability that proposals 0 to k are all accepted, as measured by
`drafter.stats.acceptance_rate_at`. `costs[k]` is the seconds of a round with k proposals; `costs[0]` is plain decoding,
one token. With one acceptance probability a, survival is a, a^2, ..., and tokens per round are
E = (1 - a^(k+1)) / (1 - a) ([arXiv 2211.17192](https://arxiv.org/abs/2211.17192), section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from operator import mul


def survival_from(rates: Sequence[float]) -> list[float]:
    """Turn conditional acceptance probabilities into survival: their running product.

    Args:
        rates (`Sequence[float]`): Probability, for each position, that its proposal is accepted if all before it were;
            `[alpha] * k` for one probability.

    Returns:
        `list[float]`: Probability, for each position, that all proposals up to it are accepted.

    Raises:
        ValueError: If a rate is outside [0, 1].

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
        survival (`Sequence[float]`): As of [`survival_from`], or measured; one entry per proposal.

    Example:
    ```python
    >>> from hf_domino.planner import expected_tokens, survival_from
    >>> expected_tokens(survival_from([0.5] * 3))
    1.875

    ```
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

    Example:
    ```python
    >>> from hf_domino.planner import alpha_for
    >>> round(alpha_for(1.875, 3), 6), alpha_for(0.9, 3), alpha_for(4.1, 3)
    (0.5, 0.0, None)

    ```
    """
    if tokens <= 1 or tokens > length + 1:
        return 0.0 if tokens <= 1 else None
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:  # until no float lies between
        low, high = (
            (middle, high) if expected_tokens([middle**k for k in range(1, length + 1)]) < tokens else (low, middle)
        )
    return high


def speed_ups(survival: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Return the speed-up over plain decoding by number of proposals, 1.0 for none.

    Args:
        survival (`Sequence[float]`): One entry per proposal.
        costs (`Sequence[float]`): Seconds of a round with 0, 1, ... proposals; `math.inf` for one that is not offered.

    Raises:
        ValueError: If there is not one cost more than there are entries of `survival`.

    Example:
    ```python
    >>> from hf_domino.planner import speed_ups
    >>> speed_ups([0.5, 0.25], [10.0, 12.0, 14.0])
    [1.0, 1.25, 1.25]

    ```
    """
    if len(costs) != len(survival) + 1:
        raise ValueError(
            f"costs must have {len(survival) + 1} entries, for 0 to {len(survival)} proposals, got {len(costs)}: put "
            "math.inf where a length is not offered."
        )
    return [tokens * (costs[0] / cost) for tokens, cost in zip(accumulate(survival, initial=1.0), costs, strict=True)]


def best_length(survival: Sequence[float], costs: Sequence[float]) -> int:
    """Return the number of proposals per round that is fastest; 0 is plain decoding, and of equals the shortest wins.

    Args:
        survival (`Sequence[float]`): One entry per proposal.
        costs (`Sequence[float]`): Seconds of a round with 0, 1, ... proposals; `math.inf` for one that is not offered.

    Example:
    ```python
    >>> from hf_domino.planner import best_length
    >>> best_length([0.5, 0.25], [10.0, 12.0, 14.0]), best_length([0.1, 0.01], [10.0, 12.0, 14.0])
    (1, 0)

    ```
    """
    gains = speed_ups(survival, costs)
    return gains.index(max(gains))


@dataclass(frozen=True)
class Costs:
    """What a round costs, in seconds.

    A DFlash drafter has `draft` alone, ours also `rollout`. A sequential one that takes the share c of a plain token
    has a `rollout` of c * `plain`, and with `verify` = `plain` the textbook's speed-up E / (1 + k c). With drafter and
    target in separate pools a round also takes one network round trip, and carries context features to the drafter and
    proposals to the target; the features of the prompt, once per call, are not counted.

    Args:
        plain (`float`): One token of the target alone.
        verify (`float`): Verification of one position.
        verify_slope (`float`, *optional*, defaults to 0): Verification of each further position.
        draft (`float`, *optional*, defaults to 0): The backbone, once per round.
        rollout (`float`, *optional*, defaults to 0): The sequential part of the drafter, per proposal.
        round_trip (`float`, *optional*, defaults to 0): Network latency, there and back.
        transfer_per_token (`float`, *optional*, defaults to 0): Sending the context features of one committed token.
        transfer_per_proposal (`float`, *optional*, defaults to 0): Sending one proposal, when sampling with its law.

    Raises:
        ValueError: If a time is negative or not finite, or `plain` or `verify` is 0.
    """

    plain: float
    verify: float
    verify_slope: float = 0.0
    draft: float = 0.0
    rollout: float = 0.0
    round_trip: float = 0.0
    transfer_per_token: float = 0.0
    transfer_per_proposal: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_zero = getattr(self, field.name), field.name not in ("plain", "verify")
            if not (0 < value < math.inf or (value == 0 and may_be_zero)):
                allowed = "0 or more" if may_be_zero else "above 0"
                raise ValueError(f"{field.name} must be a finite time {allowed}, got {value}: give seconds.")

    def of_round(self, length: int, tokens: float) -> float:
        """Return the seconds of a round with `length` proposals that commits `tokens` tokens; 0 is one plain token."""
        if length == 0:
            return self.plain
        per_proposal = self.rollout + self.verify_slope + self.transfer_per_proposal
        return self.draft + self.verify + self.round_trip + length * per_proposal + tokens * self.transfer_per_token

    def by_length(self, survival: Sequence[float]) -> list[float]:
        """Return the seconds of a round with 0, 1, ... proposals, as [`best_length`] takes them.

        Args:
            survival (`Sequence[float]`): One entry per proposal.

        Example:
        ```python
        >>> from hf_domino.planner import Costs
        >>> Costs(plain=10, draft=1, rollout=0.5, verify=12).by_length([0.5, 0.25])
        [10, 13.5, 14.0]

        ```
        """
        return [self.of_round(length, tokens) for length, tokens in enumerate(accumulate(survival, initial=1.0))]

    def side_by_side(self) -> Costs:
        """Return the same costs with drafter and target on one machine."""
        return replace(self, round_trip=0.0, transfer_per_token=0.0, transfer_per_proposal=0.0)


def break_even(length: int, costs: Costs) -> float | None:
    """Return the acceptance probability at which a round of `length` proposals is as fast as plain decoding.

    Args:
        length (`int`): Proposals per round.
        costs (`Costs`): What a round costs.

    Returns:
        `float`, *optional*: The probability; 0.0 if the round is faster even where nothing is accepted, None if it is
        slower even where everything is.

    Example:
    ```python
    >>> from hf_domino.planner import Costs, break_even
    >>> round(break_even(4, Costs(plain=10, draft=4, verify=12)), 4)
    0.3799

    ```
    """
    saved = costs.plain - costs.transfer_per_token  # by each token that a round commits
    return alpha_for(costs.of_round(length, 0) / saved, length) if saved > 0 else None


def max_round_trip(survival: Sequence[float], costs: Costs) -> float | None:
    """Return the longest network round trip at which some length is still as fast as plain decoding.

    Args:
        survival (`Sequence[float]`): One entry per proposal.
        costs (`Costs`): What a round costs; its own `round_trip` does not matter.

    Returns:
        `float`, *optional*: Seconds; None if speculation is slower than plain decoding without any round trip.

    Example:
    ```python
    >>> from hf_domino.planner import Costs, max_round_trip
    >>> max_round_trip([0.5, 0.25], Costs(plain=10, draft=1, verify=12))
    4.5

    ```
    """
    tokens = list(accumulate(survival, initial=1.0))
    seconds = replace(costs, round_trip=0.0).by_length(survival)
    spare = (tokens[length] * costs.plain - seconds[length] for length in range(1, len(tokens)))
    longest = max(spare, default=-1.0)
    return longest if longest >= 0 else None
