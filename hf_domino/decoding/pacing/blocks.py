"""How a round proposes: not at all, a whole block, or one that ends where the next proposal is not worth its time.

Shapes: B rows, R rows still generated, M candidates.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.pacing.estimates import EDGES, Acceptance
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import CoupledRule
from hf_domino.drafter.stats import Pause


class Block:
    """How far a block goes: as far as the drafter makes it."""

    goes_on: Callable[[int, torch.Tensor, torch.Tensor | None], bool] | None = None
    pause: Pause | None = None  # that it is part of
    is_comparison = False  # whether it is made to compare its time
    is_copied = False  # whether its proposals are copied from the text
    tree_size: int | None = None  # most of them, where they form a tree
    gain: float | None = None  # of a tree whose chances were read: its expected tokens in those of its likeliest path

    @property
    def length(self) -> int:
        """Proposals that are paced."""
        return 0

    def kinds(self) -> list[tuple[int, ...]]:
        """Class of every paced proposal, per row; empty where its chance is learnt otherwise."""
        return []

    def propose(self, session: DraftSession, prefixes: Prefixes, most: int, rule: CoupledRule | ResidualRule) -> Tree:
        """Make the proposals: at most so many, one behind the other.

        Args:
            session ([`DraftSession`]): Drafts.
            prefixes ([`Prefixes`]): Tokens so far of the R rows.
            most (`int`): Most tokens of a path.
            rule ([`CoupledRule`] or [`ResidualRule`]): Accepts them.
        """
        return Tree(session.propose(prefixes, most, rule.draft_noise, rule.listener(self.goes_on)))

    def teach(self, brought: Sequence[Sequence[int]]) -> list[int]:
        """Learn from the tokens that the round brought each row, however many are kept; returns how many were copied.

        Of those that both drafter and text proposed, the text's are the ones that the drafter ranked lower.
        """
        return [0] * len(brought)

    def choose_length(self, room: int) -> int:
        """Most proposals to make, of `room` at most."""
        return room


class SingleStep(Block):
    """No proposal: the target makes one step.

    Args:
        pause (`Pause`, *optional*): The pause of drafting it is part of; without one it is made to compare its time.
    """

    def __init__(self, pause: Pause | None = None):
        self.pause, self.is_comparison = pause, pause is None

    def choose_length(self, room: int) -> int:
        """None at all."""
        return 0


class PacedBlock(Block):
    """A block that ends where the next proposal is not worth its time.

    Args:
        acceptance ([`Acceptance`]): What is known of proposals.
        price (`float`): Tokens that one more proposal must bring, a row.
        num_rows (`int`): Rows of the batch.
    """

    def __init__(self, acceptance: Acceptance, price: float, num_rows: int):
        self._acceptance, self._price = acceptance, price
        self._reaches = [[1.0] * num_rows]  # chance that all proposals so far are accepted, after none, one, ...
        self._kinds: list[list[int]] = []  # class of each proposal, per row

    @property
    def length(self) -> int:
        """Proposals so far."""
        return len(self._kinds)

    @property
    def expected(self) -> float:
        """Tokens that it may be expected to commit, a row."""
        return sum(sum(reach) / len(reach) for reach in self._reaches)

    def kinds(self) -> list[tuple[int, ...]]:
        """Class of every proposal, per row."""
        return list(zip(*self._kinds, strict=True)) if self._kinds else [() for _ in self._reaches[0]]

    def add(self, index: int, kinds: list[int]) -> bool:
        """Count a proposal of these classes, one a row, in place of this and later ones; returns whether to go on."""
        del self._kinds[index:], self._reaches[index + 1 :]
        self._reaches.append(self._reach(kinds))
        self._kinds.append(kinds)
        return self._acceptance.typical * sum(self._reaches[-1]) / len(kinds) >= self._price

    def promise(self, kinds: list[int]) -> float:
        """Tokens that a further proposal of these classes, one a row, may be expected to bring, a row."""
        return sum(self._reach(kinds)) / len(kinds)

    def _reach(self, kinds: list[int]) -> list[float]:
        """The chance that all proposals so far and one of these classes are accepted, per row."""
        return [before * self._acceptance.chance(kind) for before, kind in zip(self._reaches[-1], kinds, strict=True)]


class ConfidentBlock(PacedBlock):
    """Ends while it is drafted, by the confidence of the draft law, which the host must be able to read at once."""

    def goes_on(self, index: int, scores: torch.Tensor, candidates: torch.Tensor | None = None) -> bool:
        """Whether to draft behind a proposal that was chosen by these scores `[B, M]`, of all tokens or of a few."""
        # Where all candidates are forbidden there is no law, and verification rejects the draft.
        confidences = (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp().nan_to_num(0.0).tolist()
        return self.add(index, [bisect.bisect(EDGES, confidence) for confidence in confidences])


class PlannedBlock(PacedBlock):
    """Its length is chosen beforehand, by the acceptance of each position: one of a few, each a shape of its own."""

    def choose_length(self, room: int) -> int:
        """How many proposals to make."""
        most = min(room, self._acceptance.num_kinds)
        num_rows = len(self._reaches[0])
        while self.length < most and self.add(self.length, [self.length] * num_rows):
            pass
        for position in range(self.length, fitting_length(self.length, most)):
            self.add(position, [position] * num_rows)
        return self.length


def fitting_length(length: int, most: int) -> int:
    """The next of a few lengths, as each is a shape of its own: a power of two, or `most`.

    Args:
        length (`int`): Proposals, at most `most`.
        most (`int`): Proposals of a whole block.

    Example:
    ```python
    >>> from hf_domino.decoding.pacing.blocks import fitting_length
    >>> [fitting_length(length, 12) for length in (0, 1, 3, 8, 9)]
    [0, 1, 4, 8, 12]

    ```
    """
    return min(1 << (length - 1).bit_length(), most) if length else 0
