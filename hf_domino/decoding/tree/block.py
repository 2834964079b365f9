"""A round that proposes a tree: how wide it grows, and what it teaches about chances.

Shapes: C verified tokens, M candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.pacing.blocks import Block
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.tree.growing import Grown
from hf_domino.decoding.verification import CoupledRule

FIRST_SHARPNESS = 1.2
LEAST, MOST = 0.25, 4.0
PRIOR_CURVATURE = 20.0  # weight of the first guess, as curvature of the log-likelihood
MEMORY = 0.99  # a round
FAR = 60.0  # what is so far below the best score never wins


class Sharpness:
    """Alpha, the scale of the draft law's scores that makes verified tokens likeliest; learnt by Newton steps."""

    def __init__(self, value: float = FIRST_SHARPNESS):
        self.value, self._curvature = value, PRIOR_CURVATURE

    def observe(self, scores: torch.Tensor, luck: torch.Tensor | None, winners: torch.Tensor) -> None:
        """Learn from races whose winner is known.

        Args:
            scores (`torch.Tensor`): `[C, M]`.
            luck (`torch.Tensor`, *optional*): What noise adds, `[C, M]`.
            winners (`torch.Tensor`): Place of the target's own token among the candidates, `[C]`.
        """
        scores = scores.clamp_min(scores.amax(dim=1, keepdim=True) - FAR)
        chances = (self.value * scores if luck is None else self.value * scores + luck).softmax(dim=1)
        means = (chances * scores).sum(dim=1)
        slope = (scores.gather(1, winners[:, None])[:, 0] - means).sum()
        curvature = (chances * (scores - means[:, None]).square()).sum()
        slope, curvature = torch.stack((slope, curvature)).tolist()
        if not (math.isfinite(slope) and math.isfinite(curvature)):
            return
        self._curvature = MEMORY * self._curvature + curvature
        self.value = min(max(self.value + slope / self._curvature, LEAST), MOST)


class TreeBlock(Block):
    """A tree of the nodes that are worth their time.

    Args:
        sharpness ([`Sharpness`]): What is known of chances.
        most_nodes (`int`): Most nodes.
        price (`float`): Tokens that one more node must bring.
    """

    def __init__(self, sharpness: Sharpness, most_nodes: int, price: float = 0.0):
        self._sharpness, self._most_nodes, self._price = sharpness, most_nodes, price
        self._grown: Grown | None = None

    @property
    def length(self) -> int:
        """Nodes."""
        return 0 if self._grown is None else self._grown.tree.num_nodes

    def propose(self, session: DraftSession, prefixes: Prefixes, most: int, rule: CoupledRule | ResidualRule) -> Tree:
        """Grow the tree, `most` tokens deep at most."""
        noise = rule.draft_noise
        assert noise is None or isinstance(noise, torch.Tensor), "a tree is drafted with the noise of its steps"
        self._grown = session.grow(prefixes, most, noise, self._most_nodes, self._sharpness.value, self._price)
        return self._grown.tree

    def teach(self, brought: Sequence[Sequence[int]]) -> None:
        """Learn from the tokens that the round brought its row."""
        assert self._grown is not None
        races = list(self._grown.path(brought[0]))
        if races:
            scores = torch.stack([race.scores[lane] for race, lane, _ in races])
            lucks = [race.luck for race, _, _ in races if race.luck is not None]
            winners = torch.tensor([winner for _, _, winner in races], device=scores.device)
            self._sharpness.observe(scores, torch.stack(lucks) if lucks else None, winners)


class Trees:
    """What is known of the trees of a drafter for a target.

    Args:
        most_nodes (`int`): Of one tree.
    """

    def __init__(self, most_nodes: int):
        self._most_nodes, self._sharpness = most_nodes, Sharpness()

    def block(self, price: float | None = None) -> TreeBlock:
        """A round's tree; without a price, one of the same size always, by what is known at first."""
        if price is None:
            return TreeBlock(Sharpness(), self._most_nodes)
        return TreeBlock(self._sharpness, self._most_nodes, price)
