"""One call's drafting: context features in, proposals out.

Shapes: B batch, C new context positions, P proposals, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_domino.decoding.branches import CorrectedBranches, DraftBranches, SteppingBranches
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.growing import grow
from hf_domino.decoding.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.tree import Tree, along
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache, NewContext
from hf_domino.target.view import Captured, TargetModel

MAX_WAITING = 256  # context positions that rounds without proposals may leave to be stored


class DraftSession(ABC):
    """Proposes in the rounds of one call, and keeps what it knows of the text between them.

    `observe` comes once, with the prompt. Each round may then ask `propose`; once it is verified, `learn` and then
    `observe_block` are called whether or not its proposals came from here, and `select` where rows are done.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        distribution ([`TokenDistribution`]): What drafts are chosen from.
        executor ([`Executor`], *optional*): Calls the functions of a round.
    """

    _ends: torch.Tensor | None = None  # tokens that end a text, where trees are grown without reading back

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        distribution: TokenDistribution,
        executor: Executor | None = None,
    ):
        self.drafter = drafter
        self.target = target
        self.distribution = distribution
        drafter.vocabulary.prepare(target)
        self.executor = executor or Executor()

    def observe(self, captured: Captured, length: int, mask: torch.Tensor | None = None) -> None:
        """Take the target's hidden states of a prompt's last positions, the one before the next anchor last."""
        # The prompt's length counts positions that the target had cached before, and padding, where the mask
        # [B, length] is zero.
        num_rows, num_new = captured[0].shape[:2]
        counts = [num_new] * num_rows
        if mask is None:
            mask = torch.ones(num_rows, length, dtype=torch.long, device=captured[0].device)
        position_ids = (mask.long().cumsum(dim=1) - 1).clamp_min(0)[:, -num_new:]
        mask = mask[:, -num_new:].bool()
        if not bool(mask.all()):
            # Valid positions first, in order: the cache stores the first ones of each row.
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
        """Take the hidden states of a verified block's committed positions, the anchor first."""

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:  # noqa: B027
        """Learn nothing, here, from verified proposals behind `prefixes` and the target's logits `[B, N + 1, V]`."""

    @abstractmethod
    def context(self) -> ContextCache | None:
        """Store and give all context observed so far; None where nothing of a text is kept."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""

    def propose(
        self,
        prefixes: Prefixes,
        most: int,  # tokens of a path
        noise: torch.Tensor | None = None,
        num_nodes: int | None = None,  # of a tree; None for a chain
        least_chance: float = 0.0,  # of a tree's node, to be accepted
    ) -> Tree:
        """Draft behind each row, the anchor last in it, beside the prefixes."""
        if not most:
            return Tree(prefixes.ids[:, :0])
        with self.executor.timer.phase("draft"):
            hidden = self._draft(prefixes.last(), prefixes.endings)
        with self.executor.timer.phase("correction"):
            given = (hidden, prefixes, self.distribution, noise, most)
            if num_nodes is None:
                return self.executor.run(self.choose_chain, *given)
            return self.executor.run(self.grow_tree, *given, num_nodes, least_chance)

    def choose_chain(
        self,
        hidden: torch.Tensor,  # what was drafted behind the anchors, [B, C, H]
        prefixes: Prefixes,
        distribution: TokenDistribution,
        noise: torch.Tensor | None,  # [B, C, V] or of more steps
        most: int,
    ) -> Tree:
        """Choose proposals one behind the other."""
        return Tree(self._branches_of(hidden, prefixes, distribution, noise, most).chain())

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
        """Choose proposals that branch; see [`grow`]."""
        branches = self._branches_of(hidden, prefixes, distribution, noise, most, True)
        return grow(branches, num_nodes, least_chance, self._ends)

    def _branches_of(self, *arguments: Any) -> DraftBranches:
        """Branches behind what was drafted; arguments are those of [`DraftBranches`] from `hidden` on."""
        return CorrectedBranches(self.drafter, self.target, *arguments)

    @abstractmethod
    def _take(self, captured: Captured, position_ids: torch.Tensor, counts: list[int]) -> None:
        """Take the hidden states of prompts: of each row's positions the first `counts` are valid."""

    @abstractmethod
    def _draft(self, anchors: torch.Tensor, endings: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Draft hidden states `[B, P, H]` behind anchors `[B, 1]`; stores the new context."""


class GrowingDraftSession(DraftSession):
    """Keeps the keys and values of context features in buffers that grow.

    Args:
        arguments: Those of [`DraftSession`].
        context ([`ContextCache`], *optional*): Of an earlier call, to go on from.
    """

    def __init__(self, *arguments: Any, context: ContextCache | None = None):
        super().__init__(*arguments)
        drafter = self.drafter
        self._cache = context or drafter.new_context()
        self._table: InputTable | None = None
        # On other devices, knowing which token to look up would have to be waited for.
        if drafter.head and drafter.head.gru is not None and drafter.device.type == "cpu":
            self._table = InputTable(drafter.head.gru, self.target)
        self._device = drafter.device  # the drafter looks it up among its parameters
        self._captured: list[Captured] = []  # [B, C, H] each, not yet fused and in the cache
        self._positions: list[torch.Tensor] = []  # [B, C] each, absolute
        self._num_waiting = 0  # their columns
        self._new_counts: list[int] = []  # per row, how many of them are valid: the first ones
        self._anchors = torch.empty(0)  # [B, 1], absolute position of each row's anchor

    def observe_block(self, captured: Captured, counts: Sequence[int]) -> None:
        """Take the hidden states of a verified block's committed positions, the anchor first."""
        # Of the tokens committed in each row, the last is the next anchor, which the target has not seen.
        longest = max(counts)
        if longest == 1:
            positions = self._anchors
        else:
            positions = self._anchors + torch.arange(longest, device=self._device)
        self._take(tuple(states[:, :longest] for states in captured), positions, list(counts))

    def _take(self, captured: Captured, position_ids: torch.Tensor, counts: list[int]) -> None:
        position_ids = position_ids.to(self._device)
        # What rounds without proposals leave is stored in one go, as long as no row has gaps in it.
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
        """Store and give all context observed so far; None where nothing of a text is kept."""
        if self._captured:
            with self.executor.timer.phase("draft"):
                self._draft(self._anchors[:, :0])
        return self._cache

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        self._cache.select(rows)
        kept = list(rows)
        if self._captured:
            self._captured = [tuple(states[kept] for states in captured) for captured in self._captured]
            self._positions = [positions[kept] for positions in self._positions]
            self._new_counts = [self._new_counts[row] for row in rows]
        self._anchors = self._anchors[kept]

    def _branches_of(self, *arguments: Any) -> DraftBranches:
        """Branches behind what was drafted; arguments are those of [`DraftBranches`] from `hidden` on."""
        branches = self.drafter.branches(self.target, arguments[0], self._anchors, self._cache)
        if branches is not None:
            return SteppingBranches(branches, self.drafter, self.target, *arguments)
        return CorrectedBranches(self.drafter, self.target, *arguments, table=self._table)

    def _draft(self, anchors: torch.Tensor, endings: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Draft hidden states `[B, P, H]` behind anchors `[B, 1]`; stores the new context, also for `[B, 0]`."""
        assert self._anchors.numel(), "observe the context before proposing"
        new = None
        if self._captured:
            layers = [torch.cat(pieces, dim=1) for pieces in zip(*self._captured, strict=True)]
            features = self.drafter.fuse_context([states.to(self._device) for states in layers])
            new = NewContext(features, torch.cat(self._positions, dim=1), self._new_counts)
        draft_hidden = self.drafter.draft(self.target, anchors, self._anchors, new, self._cache, endings)
        self._captured = []
        self._positions = []
        self._num_waiting = 0
        return draft_hidden


def _last_of_each(
    count: int, captured: Captured, position_ids: torch.Tensor, counts: Sequence[int]
) -> tuple[Captured, torch.Tensor, list[int]]:
    """The last `count` valid positions of each row, of the first `counts` of its hidden states `[B, C, H]`."""
    kept = [min(count, number) for number in counts]
    starts = torch.tensor(counts) - torch.tensor(kept)
    columns = (starts[:, None] + torch.arange(count)).clamp_max(position_ids.shape[1] - 1).to(position_ids.device)
    return tuple(along(columns, states) for states in captured), along(columns, position_ids), kept
