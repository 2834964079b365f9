"""What one round is: the arm that is played, the plan of it, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_domino.decoding.copies import Offer
    from hf_domino.drafter.stats import Pause


@dataclass(frozen=True)
class Arm:
    """A way to make a round.

    Args:
        length (`int`): Most proposals of a path; 0 for a single step of the target.
        tree_size (`int`, *optional*): Most nodes, where proposals form a tree.
        is_copied (`bool`, *optional*, defaults to `False`): Whether proposals are copied from the text.
    """

    length: int
    tree_size: int | None = None
    is_copied: bool = False

    @property
    def is_drafted(self) -> bool:
        """Whether the drafter makes the proposals."""
        return self.length > 0 and not self.is_copied


STEP = Arm(0)


@dataclass(frozen=True)
class Plan:
    """What the next round is to propose.

    Args:
        arm ([`Arm`]): How.
        length (`int`): Most proposals of a path.
        offer ([`Offer`], *optional*): What is copied.
        pause ([`Pause`], *optional*): The pause of drafting that a single step is part of.
        is_comparison (`bool`, *optional*, defaults to `False`): Whether it is a single step made to measure its time.
        least_chance (`float`, *optional*, defaults to 0.0): Nodes of a tree that are less likely are left out.
    """

    arm: Arm
    length: int
    offer: Offer | None = None
    pause: Pause | None = None
    is_comparison: bool = False
    least_chance: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What came of a round.

    Args:
        plan ([`Plan`]): What it was to propose.
        rows (`Sequence[int]`): Rows of the batch that were still generated.
        num_proposed (`int`): Proposals per row, all nodes of a tree.
        num_brought (`list[int]`): Tokens per row, bonus token included, those behind a stop too.
    """

    plan: Plan
    rows: Sequence[int]
    num_proposed: int
    num_brought: list[int]

    @property
    def tokens(self) -> float:
        """Tokens it brought, the mean of its rows."""
        return sum(self.num_brought) / len(self.num_brought)


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
    return min(1 << (length - 1).bit_length(), most) if length else 0
