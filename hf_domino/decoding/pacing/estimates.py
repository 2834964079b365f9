"""What rounds teach: how likely proposals are accepted, what rounds bring and what they cost."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence

# Confidence of the draft law in its likeliest token; between two edges, one acceptance rate is learnt.
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
PRIOR_ROUNDS = 4.0  # weight of the first guess
PRIOR_BY_POSITION = 0.8
MEMORY = 0.98  # of acceptance, a proposal of its class
PRIOR_VARIANCE = 1.0  # of a round's tokens: a few rounds may all be alike by chance
RECENT_ROUNDS = 48  # whose tokens and seconds count
LATEST_ROUNDS, HABIT_ROUNDS = 12, 6  # of those, the last ones say how the text is now; all count as so many of them
HICCUP = 1.5  # durations beyond this many medians are the machine's doing
# Of a round's time, one proposal more: before it is known, and at most.
DEFAULT_SLOPE, MAX_SLOPE = 0.02, 0.2
SURE_BY = 1.0  # standard errors by which rounds must bring too little before drafting pauses


class Acceptance:
    """The chance that a proposal is accepted once all before it are, by what was known when it was drafted.

    Args:
        num_positions (`int`, *optional*): Positions of a block, each a class of proposals; None for classes of the
            draft law's confidence, between `EDGES`, which is believed at first.
    """

    def __init__(self, num_positions: int | None = None):
        guesses = [(low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True)]
        if num_positions is not None:
            guesses = [PRIOR_BY_POSITION] * num_positions
        self._accepted = [PRIOR_ROUNDS * chance for chance in guesses]
        self._seen = [PRIOR_ROUNDS] * len(guesses)

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
            self._accepted[kind] = MEMORY * self._accepted[kind] + (position < num_accepted)
            self._seen[kind] = MEMORY * self._seen[kind] + 1


class Costs:
    """What recent rounds brought and took, and what a proposal more costs."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._recent: deque[tuple[int, float, float | None]] = deque(maxlen=RECENT_ROUNDS)

    @property
    def best_rate(self) -> float:
        """Tokens per second that rounds may well bring: what they brought of late, not without what they did before."""
        seconds = typical_seconds([seconds for _, _, seconds in self._recent if seconds is not None])
        if not seconds:
            return float("inf")
        tokens = [tokens for _, tokens, _ in self._recent]
        latest = tokens[-LATEST_ROUNDS:]
        habit, weight = sum(tokens) / len(tokens), min(len(tokens), HABIT_ROUNDS)
        variance = sum((count - habit) ** 2 for count in tokens) / len(tokens) + PRIOR_VARIANCE
        mean = (weight * habit + sum(latest)) / (weight + len(latest))
        return (mean + SURE_BY * (variance / (weight + len(latest))) ** 0.5) / seconds

    @property
    def price(self) -> float:
        """Tokens that the time of one more proposal is worth; 0 before it is known."""
        timed = [(length, seconds) for length, _, seconds in self._recent if seconds is not None]
        mean = typical_seconds([seconds for _, seconds in timed])
        if not mean:
            return 0.0
        mean_length = sum(length for length, _ in timed) / len(timed)
        deviations = [(length - mean_length, min(seconds, HICCUP * mean) - mean) for length, seconds in timed]
        covariance = sum(longer * later for longer, later in deviations) / len(timed)
        variance = sum(longer**2 for longer, _ in deviations) / len(timed)
        slope = (covariance + DEFAULT_SLOPE * mean) / (variance + 1)  # one proposal's worth of prior
        rate = sum(tokens for _, tokens, _ in self._recent) / len(self._recent) / mean
        return rate * min(max(slope, 0.0), MAX_SLOPE * mean)

    def observe(self, num_proposed: int, num_tokens: float, seconds: float | None) -> None:
        """Count a round: proposals per row, tokens per row it committed on average, wall time if it is typical."""
        self.num_rounds += 1
        self._recent.append((num_proposed, num_tokens, seconds))


def typical_seconds(seconds: Collection[float]) -> float:
    """Mean of durations, less what hiccups of the machine added; 0 of none."""
    if not seconds:
        return 0.0
    most = HICCUP * statistics.median(seconds)
    return sum(min(duration, most) for duration in seconds) / len(seconds)
