"""The records of one round: how it proposes (arm and plan), and its result (outcome)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_domino.statistics.stats import DecodingStats, Pause

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arm:
    """A way to make a round."""

    length: int  # most proposals of a path; 0 for a plain decode step
    tree_size: int | None = None  # most nodes, where proposals form a tree
    is_lookup: bool = False  # whether prompt lookup makes the proposals

    @property
    def is_drafted(self) -> bool:
        """Whether the drafter makes the proposals."""
        return self.length > 0 and not self.is_lookup

    @property
    def width(self) -> int:
        """Most proposals that are verified."""
        return self.tree_size or self.length


STEP = Arm(0)


@dataclass(frozen=True)
class Offer:
    """What prompt lookup has found.

    Args:
        tokens (`list[list[int]]`): Of each row, equally many.
        classes (`list[list[int]]`): The class of each of them, see `prompt_lookup.GUESSES`.
        expected (`float`): Tokens that a round with these proposals is expected to emit, per sequence.
    """

    tokens: list[list[int]]
    classes: list[list[int]]
    expected: float

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return len(self.tokens[0])


@dataclass(frozen=True)
class Plan:
    """What the next round is to propose."""

    arm: Arm
    length: int  # most proposals of a path
    offer: Offer | None = None  # what prompt lookup proposes
    pause: Pause | None = None  # the pause of drafting that a plain decode step is part of
    is_comparison: bool = False  # whether it is a plain decode step to measure its time
    least_chance: float = 0.0  # nodes of a tree that are less likely are left out


@dataclass(frozen=True)
class Outcome:
    """The result of a round."""

    plan: Plan  # what it was to propose
    rows: Sequence[int]  # of the batch, those that were still generated
    num_proposed: int  # tokens it proposed in each, all nodes of a tree
    num_emitted: list[int]  # tokens emitted in each, with the bonus token and with those behind a stop
    num_kept: Sequence[int] = ()  # how many of those the texts took, up to their ends
    path: torch.Tensor | None = None  # the position that each token was chosen at, [R, C]; None for a chain

    @property
    def tokens(self) -> float:
        """Emitted tokens, the mean over its sequences."""
        return sum(self.num_emitted) / len(self.num_emitted)

    def add_to(self, stats: DecodingStats) -> None:
        """Add the round to the statistics of its call."""
        plan = self.plan
        stats.count_pause(plan.pause, self.rows)
        stats.tree_size = plan.arm.tree_size or stats.tree_size
        for row, count in zip(self.rows, self.num_emitted, strict=True):
            stats.rows[row].append(count)
            stats.proposed[row].append(self.num_proposed)
            stats.looked_up[row].append(plan.offer is not None)


def fitting_length(length: int, most: int) -> int:
    """Round up to a power of two, or to `most`: few lengths, as each is a shape of its own.

    Args:
        length (`int`): Proposals, at most `most`.
        most (`int`): Proposals of a whole block.

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
