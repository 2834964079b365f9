"""A round that proposes trees: how wide they grow, and what they teach about chances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.pacing.blocks import Block
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule
from hf_domino.decoding.tree.chances import Chances
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.tree.growing import Grown
from hf_domino.decoding.verification import CoupledRule

ADAPTIVE_SIZE = 16  # nodes that paid most where trees were measured


class TreeBlock(Block):
    """Trees of the nodes that are worth their time.

    Args:
        chances ([`Chances`]): What is known of them.
        most_nodes (`int`): Most nodes of a tree.
        price (`float`, *optional*): Tokens that one more node must bring, a row; None to keep all and learn nothing.
    """

    def __init__(self, chances: Chances, most_nodes: int, price: float | None = None):
        self.tree_size, self._chances, self._price = most_nodes, chances, price
        self._grown: Grown | None = None

    @property
    def length(self) -> int:
        """Nodes."""
        return 0 if self._grown is None else self._grown.tree.num_nodes

    def propose(self, session: DraftSession, prefixes: Prefixes, most: int, rule: CoupledRule | ResidualRule) -> Tree:
        """Grow the trees, `most` tokens deep at most."""
        noise = rule.draft_noise
        assert noise is None or isinstance(noise, torch.Tensor), "a tree is drafted with the noise of its steps"
        self._grown = session.grow(
            prefixes, most, noise, num_nodes=self.tree_size, chances=self._chances, least_chance=self._price or 0.0
        )
        return self._grown.tree

    def teach(self, brought: Sequence[Sequence[int]]) -> list[int]:
        """Learn from the tokens that the round brought each row, and count those that were copied."""
        learns = self._grown is not None and self._price is not None and self._chances.wants_to_learn()
        if self._grown is None or not (learns or self._grown.has_copies):
            return [0] * len(brought)
        decided = [list(self._grown.decided(row, tokens)) for row, tokens in enumerate(brought)]
        if learns:
            self.gain = self._grown.gain
            self._chances.observe([one for row in decided for one in row])
        # The last token is the target's own; a race behind it says what would have been copied.
        return [
            sum(one.is_copied for one in row[: len(tokens) - 1]) for row, tokens in zip(decided, brought, strict=True)
        ]


class Trees:
    """Knowledge about the trees of a drafter for a target.

    Args:
        size (`int` or `str`): Most nodes of one, or `"adaptive"`.
    """

    def __init__(self, size: int | str):
        self.is_optional = isinstance(size, str)  # whether rounds propose chains where these bring more
        self._most_nodes, self._chances = ADAPTIVE_SIZE if isinstance(size, str) else size, Chances()

    def block(self, price: float | None = None) -> TreeBlock:
        """A round's trees; without a price, ones of the same size always, by what is known at first."""
        return TreeBlock(Chances() if price is None else self._chances, self._most_nodes, price)
