"""What is said of one round: how it proposes (arm and plan), and what came of it (outcome)."""

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

    length: int  # most proposals of a path; 0 for a single step of the target
    tree_size: int | None = None  # most nodes, where proposals form a tree
    is_copied: bool = False  # whether proposals are copied from the text

    @property
    def is_drafted(self) -> bool:
        """Whether the drafter makes the proposals."""
        return self.length > 0 and not self.is_copied


STEP = Arm(0)


@dataclass(frozen=True)
class Offer:
    """What a round can copy.

    Args:
        tokens (`list[list[int]]`): Of each row, equally many.
        kinds (`list[list[int]]`): Class of each of them.
        expected (`float`): Tokens that copying them may be expected to bring, a row.
    """

    tokens: list[list[int]]
    kinds: list[list[int]]
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
    offer: Offer | None = None  # what is copied
    pause: Pause | None = None  # the pause of drafting that a single step is part of
    is_comparison: bool = False  # whether it is a single step for the sake of its time
    least_chance: float = 0.0  # nodes of a tree that are less likely are left out


@dataclass(frozen=True)
class Outcome:
    """What came of a round."""

    plan: Plan  # what it was to propose
    rows: Sequence[int]  # of the batch, those that were still generated
    num_proposed: int  # tokens it proposed in each, all nodes of a tree
    num_brought: list[int]  # tokens it brought in each, the bonus token included, those behind a stop too
    num_kept: Sequence[int] = ()  # how many of those the texts took, up to their ends
    path: torch.Tensor | None = None  # the position that each token was chosen at, [R, C]; None for a chain

    @property
    def tokens(self) -> float:
        """Tokens it brought, the mean of its rows."""
        return sum(self.num_brought) / len(self.num_brought)

    def add_to(self, stats: DecodingStats) -> None:
        """Note in a call's statistics what came of the round."""
        plan = self.plan
        stats.count_pause(plan.pause, self.rows)
        stats.tree_size = plan.arm.tree_size or stats.tree_size
        for row, count in zip(self.rows, self.num_brought, strict=True):
            stats.rows[row].append(count)
            stats.proposed[row].append(self.num_proposed)
            stats.copied[row].append(plan.offer is not None)


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
