"""The records of one round: how it proposes tokens (arm and plan), and its result (outcome)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_domino.stats.decoding_stats import DecodingStats, Pause

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arm:
    """One way to run a round, which the policy can choose."""

    length: int  # maximum number of proposals on a path; 0 for a plain decode step
    tree_size: int | None = None  # maximum number of nodes, if proposals form a tree
    is_lookup: bool = False  # whether prompt lookup makes the proposals

    @property
    def is_drafted(self) -> bool:
        """Whether the drafter makes the proposals."""
        return self.length > 0 and not self.is_lookup

    @property
    def width(self) -> int:
        """The maximum number of proposals that are verified."""
        return self.tree_size or self.length


STEP = Arm(0)


@dataclass(frozen=True)
class Offer:
    """The proposals of prompt lookup for one round.

    Args:
        tokens (`list[list[int]]`): The proposed tokens of each sequence, equally many for all.
        classes (`list[list[int]]`): The class of each proposed token; see `prompt_lookup.GUESSES`.
        expected (`float`): How many tokens a round with these proposals is expected to emit, per sequence.
    """

    tokens: list[list[int]]
    classes: list[list[int]]
    expected: float

    @property
    def length(self) -> int:
        """The number of proposed tokens per sequence."""
        return len(self.tokens[0])


@dataclass(frozen=True)
class Plan:
    """How the next round proposes tokens."""

    arm: Arm
    length: int  # maximum number of proposals on a path
    offer: Offer | None = None  # the proposals of prompt lookup, if the round uses it
    pause: Pause | None = None  # the pause of drafting that this round belongs to
    is_comparison: bool = False  # whether this is a plain decode step that only measures its own time
    least_chance: float = 0.0  # leave out nodes of a tree that are less likely to be accepted than this
    is_timed: bool = True  # whether the time of the round is that of its arm

    def followed_with(self, num_proposals: int) -> Plan:
        """The plan that a round has followed: without proposals, it was a plain decode step."""
        if self.length and not num_proposals:
            return Plan(STEP, 0, is_timed=False)
        return self


@dataclass(frozen=True)
class Outcome:
    """The result of a round."""

    plan: Plan  # the plan that the round followed
    rows: Sequence[int]  # indices of the R unfinished sequences in the batch
    num_proposed: int  # tokens proposed for each sequence, counting all nodes of a tree
    num_emitted: list[int]  # tokens emitted for each sequence, with the bonus token and with tokens after a stop
    num_kept: Sequence[int] = ()  # how many of these each sequence kept, up to its end
    path: torch.Tensor | None = None  # the position that each emitted token was chosen at, [R, C]; None for a chain

    @property
    def tokens(self) -> float:
        """The number of emitted tokens, averaged over the sequences."""
        return sum(self.num_emitted) / len(self.num_emitted)

    def add_to(self, stats: DecodingStats) -> None:
        """Add the round to the statistics of its call."""
        plan = self.plan
        if plan.pause is not None:
            stats.count_pause(plan.pause, self.rows)
        stats.tree_size = plan.arm.tree_size or stats.tree_size
        for row, count in zip(self.rows, self.num_emitted, strict=True):
            stats.rows[row].append(count)
            stats.proposed[row].append(self.num_proposed)
            stats.looked_up[row].append(plan.offer is not None)


def fitting_length(length: int, most: int) -> int:
    """Round a length up to a power of two, or to `most`, so that there are only a few different shapes.

    Args:
        length (`int`): Number of proposals, at most `most`.
        most (`int`): Number of proposals in a full block.

    Example:
    ```python
    >>> from hf_domino.decoding.round import fitting_length
    >>> [fitting_length(length, 12) for length in (0, 1, 3, 8, 9)]
    [0, 1, 4, 8, 12]

    ```
    """
    if length:
        return min(1 << (length - 1).bit_length(), most)
    return 0
