"""`Scorer`: how a method scores the tokens that can follow the paths of a round.

A round drafts paths depth by depth. It begins with one empty path after each anchor; a chain stays at one path, and a
tree forks into branches. Whatever chooses the tokens (`decoding/branches.py`) asks the scorer for the scores of the
next ones, and tells it which were chosen.

There are four scorers. This one has nothing but the base logits of all depths. A correction head's adds a correction
that depends on the tokens before (`methods/correction.py`). EAGLE-3's runs the drafter again after each token, and
token recycling's looks the last token up in a table.

Shapes: B sequences, L branches of each, C depths, M candidates of a depth, H hidden size, D tokens of the draft
vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_domino.targets.view import TargetModel


class Drafted(NamedTuple):
    """What a method's `draft` has computed, and where.

    Args:
        hidden (`torch.Tensor`): The draft hidden states after the anchors, as the method's `draft` returns them.
        anchors (`torch.Tensor`): The last token of each sequence, `[B, 1]`.
        positions (`torch.Tensor`, *optional*): Positions of the anchors, `[B, 1]`. Only methods that are not parallel
            need them, and the cache.
        cache (`ContextCache`, *optional*): The drafter's context.
    """

    hidden: torch.Tensor
    anchors: torch.Tensor
    positions: torch.Tensor | None = None
    cache: Any = None


class Scorer:
    """Scores drafts by their base logits alone.

    A scorer is made once a call. In each round, `begin` is called once, `narrow` once (or at each depth, if a method
    computes base logits depth by depth), and then `scores` and `advance` in turn.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Provides the embeddings and the lm_head.
    """

    is_parallel = True  # whether the base logits of all depths are known when the round begins
    # How often a chain is chosen again after its tokens were chosen from base logits alone; None if tokens must be
    # chosen one after the other.
    num_passes: int | None = 0
    min_nodes = 1  # how many nodes a tree has at least, even if none is worth its time
    reads_processors: tuple[type, ...] | None = None  # types of logits processors that scores can take; None for all
    logits: torch.Tensor  # base logits: `[B, C, D]`, or `[B * L, 1, D]` of the next depth if they are not parallel
    columns: torch.Tensor | None = None  # of the candidates, if the method chooses them itself; M takes D's place then

    def __init__(self, drafter: Any, target: TargetModel):
        self.drafter = drafter
        self.target = target
        self.vocabulary = drafter.vocabulary.of_target(target)
        self.num_branches = 1  # L

    @property
    def num_bytes(self) -> int:
        """The memory of what is kept between rounds."""
        return 0

    def begin(self, drafted: Drafted) -> None:
        """Begin a round."""
        self.num_branches = 1
        self.logits = self.drafter.logits(self.target, drafted.hidden.to(drafted.anchors.device))

    def narrow(self, logits: torch.Tensor, columns: torch.Tensor | None = None, is_fused: bool = False) -> None:
        """Take processed base logits in place of `logits`, of all tokens or of some candidates, for the scores below.

        Args:
            logits (`torch.Tensor`): Base logits of the shape of `logits`, or with M in place of D.
            columns (`torch.Tensor`, *optional*): The columns of the M candidates, of the same shape.
            is_fused (`bool`, *optional*, defaults to `False`): Whether fused kernels compute the scores.
        """
        self.logits = logits
        self._by_depth = logits.unbind(1)

    def scores(self, depth: int) -> torch.Tensor:
        """Score the next tokens of each branch, `[B * L, M]`, before processing."""
        return self.of_branches(self._by_depth[depth if self.is_parallel else 0])

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """Extend branches by a token each.

        Args:
            tokens (`torch.Tensor`): The tokens, `[B, L']`.
            parents (`torch.Tensor`, *optional*): The index of the branch that each of them extends, `[B, L']`. By
                default, they extend the only branch.
        """
        self.num_branches = tokens.shape[1]

    def refine(self, tokens: torch.Tensor) -> torch.Tensor:
        """Score all depths `[B, C, M]` again, after the tokens `[B, C]` of the pass before."""
        raise NotImplementedError

    def choose(self, depth: int, noise: torch.Tensor | None, temperature: float) -> torch.Tensor:
        """Choose the column `[B]` of a chain's next token by a fused kernel, given the noise `[B, D]` of its step."""
        raise NotImplementedError

    def of_branches(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat values `[B, ...]` for each branch, `[B * L, ...]`; values of branches stay as they are."""
        if self.num_branches == 1 or not self.is_parallel:
            return values
        return values.repeat_interleave(self.num_branches, dim=0)

    def extended(self, states: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        """Choose the states `[B * L', ...]` of the branches that are extended, from those of all, `[B * L, ...]`."""
        if parents is None:
            return states
        return along(parents, states.unflatten(0, (len(parents), -1))).flatten(0, 1)


def along(path: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Choose the values on a path `[B, C]` from the values `[B, W, ...]` of all positions; without a path, all."""
    if path is None:
        return values
    index = path.to(values.device).view(*path.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:]))
