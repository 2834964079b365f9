"""The drafting of one call: a session receives context features and returns proposals.

Shapes: B sequences, C new context positions, P proposals, N nodes, H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_domino.decoding.branches import Branches, draft_distribution
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.growing import grow
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.tree import Tree
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache, NewContext
from hf_domino.methods.scorer import along
from hf_domino.targets.view import Captured, TargetModel

MAX_WAITING = 256  # how many context positions rounds without drafts may collect before they are stored in the cache


class DraftSession(ABC):
    """Drafts in the rounds of one call, and keeps the drafter's context between them.

    `observe` is called once, with the prompt. Each round may then call `propose`. After a round is verified, `learn`
    and then `observe_block` are called, even if its proposals did not come from this session. `select` is called when
    sequences are done.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Provides the embeddings and the lm_head.
        distribution ([`TokenDistribution`]): The distribution that draft tokens are chosen from.
        executor ([`Executor`], *optional*): Calls the functions of a round.
    """

    # End-of-text tokens, if trees are grown without copying results to the host.
    _ends: torch.Tensor | None = None

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        distribution: TokenDistribution,
        executor: Executor | None = None,
    ):
        self.drafter = drafter
        self.target = target
        drafter.vocabulary.prepare(target)
        self.executor = executor or Executor()
        self.scorer = drafter.scorer(target, reads_host=not self.executor.is_fixed)
        self.distribution = draft_distribution(self.scorer, distribution)
        if self.executor.is_fixed:
            ends = torch.tensor(sorted(distribution.stops.eos_token_ids), dtype=torch.long)
            self._ends = self.executor.hold_on_device("ends", ends)

    def observe(self, captured: Captured, length: int, mask: torch.Tensor | None = None) -> None:
        """Store the target's hidden states at the last positions of a prompt, up to the one before the next anchor."""
        # `length` counts the positions that the target had cached before, and padding, where `mask` [B, length] is 0.
        num_rows, num_new = captured[0].shape[:2]
        counts = [num_new] * num_rows
        if mask is None:
            mask = torch.ones(num_rows, length, dtype=torch.long, device=captured[0].device)
        position_ids = (mask.long().cumsum(dim=1) - 1).clamp_min(0)[:, -num_new:]
        mask = mask[:, -num_new:].bool()
        if not bool(mask.all()):
            # Move the valid positions to the front, in order, because the cache stores the first `counts` of each
            # sequence.
            counts = mask.sum(dim=1).tolist()
            order = mask.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, *counts)]
            captured = tuple(along(order, states) for states in captured)
            position_ids = position_ids.gather(1, order)
        window = self.drafter.config.draft_window_size
        if window is not None and max(counts) > window:
            captured, position_ids, counts = _last_of_each(window, captured, position_ids, counts)
        self._take(captured, position_ids, counts)

    @abstractmethod
    def observe_block(self, captured: Captured, counts: Sequence[int]) -> None:
        """Store the hidden states at the committed positions of a verified block, which begins with the anchor."""

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:  # noqa: B027
        """Learn from the target's logits `[B, N + 1, V]` of verified proposals. By default this does nothing."""

    @abstractmethod
    def context(self) -> ContextCache | None:
        """Store all context observed so far in the cache, and return the cache; None if no context is kept."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""

    def propose(
        self,
        prefixes: Prefixes,
        most: int,  # the largest number of tokens on a path
        noise: torch.Tensor | None = None,
        num_nodes: int | None = None,  # the largest number of nodes of a tree; None for a chain
        least_chance: float = 0.0,  # leave out nodes of a tree that are less likely to be accepted than this
    ) -> Tree:
        """Draft tokens that continue each sequence, whose last token is the anchor, on the device of the prefixes."""
        if not most:
            return Tree(prefixes.ids[:, :0])
        with self.executor.timer.phase("draft"):
            hidden = self._draft(prefixes.last(), prefixes.last_tokens)
        with self.executor.timer.phase("correction"):
            given = (hidden, prefixes, self.distribution, noise, most)
            if num_nodes is None:
                return self.executor.run(self.choose_chain, *given)
            return self.executor.run(self.grow_tree, *given, num_nodes, least_chance)

    def choose_chain(
        self,
        hidden: torch.Tensor,  # draft hidden states after the anchors, [B, P, H]
        prefixes: Prefixes,
        distribution: TokenDistribution,
        noise: torch.Tensor | None,  # [B, P, V] or more steps
        most: int,
    ) -> Tree:
        """Choose a chain of proposals, one after the other."""
        self._begin(hidden[:, :most], prefixes.last())
        return Tree(Branches(self.scorer, prefixes, distribution, noise, most).chain())

    def grow_tree(
        self,
        hidden: torch.Tensor,
        prefixes: Prefixes,
        distribution: TokenDistribution,
        noise: torch.Tensor | None,
        most: int,
        num_nodes: int,
        least_chance: float,
    ) -> Tree:
        """Choose a tree of proposals; see [`grow`]."""
        self._begin(hidden[:, :most], prefixes.last())
        branches = Branches(self.scorer, prefixes, distribution, noise, most, is_tree=True)
        return grow(branches, num_nodes, least_chance, self._ends)

    def _begin(self, hidden: torch.Tensor, anchors: torch.Tensor) -> None:
        """Begin a round of the scorer, given the draft hidden states `[B, P, H]` after the anchors `[B, 1]`."""
        self.scorer.begin(hidden, anchors)

    @abstractmethod
    def _take(self, captured: Captured, position_ids: torch.Tensor, counts: list[int]) -> None:
        """Store hidden states of which the first `counts` positions of each sequence are valid."""

    @abstractmethod
    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Store the new context, and draft hidden states `[B, P, H]` for the positions after anchors `[B, 1]`."""


class GrowingDraftSession(DraftSession):
    """A draft session that keeps the keys and values of context features in buffers that grow.

    Args:
        arguments: The arguments of [`DraftSession`].
        context ([`ContextCache`], *optional*): The context of an earlier call, to continue from.
    """

    def __init__(self, *arguments: Any, context: ContextCache | None = None):
        super().__init__(*arguments)
        drafter = self.drafter
        self._cache = context or drafter.new_context()
        self._device = drafter.device  # stored, because the property searches the drafter's parameters each time
        self._captured: list[Captured] = []  # [B, C, H] each, not yet fused and stored in the cache
        self._positions: list[torch.Tensor] = []  # their absolute positions, [B, C] each
        self._num_waiting = 0  # how many columns they have together
        self._new_counts: list[int] = []  # how many of these columns, from the first on, are valid in each sequence
        self._anchors = torch.empty(0)  # [B, 1], absolute position of each sequence's anchor

    def observe_block(self, captured: Captured, counts: Sequence[int]) -> None:
        """Store the hidden states at the committed positions of a verified block, which begins with the anchor."""
        # The last token committed in each sequence is the next anchor, which the target has not processed yet.
        longest = max(counts)
        if longest == 1:
            positions = self._anchors
        else:
            positions = self._anchors + torch.arange(longest, device=self._device)
        self._take(tuple(states[:, :longest] for states in captured), positions, list(counts))

    def _take(self, captured: Captured, position_ids: torch.Tensor, counts: list[int]) -> None:
        position_ids = position_ids.to(self._device)
        # Rounds without drafts collect hidden states here, and these are stored together later. That only works as long
        # as all collected columns are valid in every sequence.
        if self._captured and not (min(self._new_counts) == self._num_waiting < MAX_WAITING):
            self.context()
        last = position_ids[:, -1:]
        if min(counts) < position_ids.shape[1]:
            last = position_ids.gather(1, torch.tensor(counts, device=self._device)[:, None].sub(1).clamp_min(0))
        self._anchors = last + 1
        self._captured.append(captured)
        self._positions.append(position_ids)
        self._new_counts = [self._num_waiting + count for count in counts]
        self._num_waiting += position_ids.shape[1]

    def context(self) -> ContextCache | None:
        """Store all context observed so far in the cache, and return the cache."""
        if self._captured:
            with self.executor.timer.phase("draft"):
                self.drafter.store(self._taken(), self._cache)
        return self._cache

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self._cache.select(rows)
        kept = list(rows)
        if self._captured:
            self._captured = [tuple(states[kept] for states in captured) for captured in self._captured]
            self._positions = [positions[kept] for positions in self._positions]
            self._new_counts = [self._new_counts[row] for row in rows]
        self._anchors = self._anchors[kept]

    def _begin(self, hidden: torch.Tensor, anchors: torch.Tensor) -> None:
        self.scorer.begin(hidden, anchors, self._anchors, self._cache)

    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Store the new context, and draft hidden states `[B, P, H]` for the positions after anchors `[B, 1]`."""
        assert self._anchors.numel(), "observe the context before proposing"
        new = self._taken() if self._captured else None
        return self.drafter.draft(self.target, anchors, self._anchors, new, self._cache, last_tokens)

    def _taken(self) -> NewContext:
        """Take the new context, fused, out of what has been collected."""
        layers = [torch.cat(pieces, dim=1) for pieces in zip(*self._captured, strict=True)]
        features = self.drafter.fuse_context([states.to(self._device) for states in layers])
        new = NewContext(features, torch.cat(self._positions, dim=1), self._new_counts)
        self._captured = []
        self._positions = []
        self._num_waiting = 0
        return new


def _last_of_each(
    count: int, captured: Captured, position_ids: torch.Tensor, counts: Sequence[int]
) -> tuple[Captured, torch.Tensor, list[int]]:
    """Keep the last `count` of the valid positions of each sequence, which are the first `counts` in `[B, C, H]`."""
    kept = [min(count, number) for number in counts]
    starts = torch.tensor(counts) - torch.tensor(kept)
    columns = (starts[:, None] + torch.arange(count)).clamp_max(position_ids.shape[1] - 1).to(position_ids.device)
    return tuple(along(columns, states) for states in captured), along(columns, position_ids), kept
