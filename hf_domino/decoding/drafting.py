"""The drafting of one call: a session receives context features and returns proposals.

Shapes: B sequences, C new context positions, P proposals, N nodes, H hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from hf_domino.decoding.branches import Branches, draft_distribution
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.growing import grow
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.tree import Tree
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache, DraftContext, NewContext
from hf_domino.methods.scorer import Drafted, along
from hf_domino.targets.view import Captured, TargetModel


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

    # Returns the tokens of a sequence (by its index) from an index on. The code that runs the rounds sets it.
    read: Callable[[int, int], Sequence[int]]
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
        self.reads_host = not self.executor.is_fixed  # whether tensors may be read on the host while it drafts
        self.scorer = drafter.scorer(target, self.reads_host)
        self.distribution = draft_distribution(self.scorer, distribution)
        if not self.reads_host:
            ends = torch.tensor(sorted(distribution.stops.eos_token_ids), dtype=torch.long)
            self._ends = self.executor.hold_on_device("ends", ends)

    @abstractmethod
    def observe(self, captured: Captured, length: int, mask: torch.Tensor | None = None) -> None:
        """Store the target's hidden states at the last positions of a prompt, up to the one before the next anchor."""
        # `length` counts the positions that the target had cached before, and padding, where `mask` [B, length] is 0.

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
        self.scorer.begin(self._drafted(hidden[:, :most], prefixes.last()))
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
        self.scorer.begin(self._drafted(hidden[:, :most], prefixes.last()))
        branches = Branches(self.scorer, prefixes, distribution, noise, most, is_tree=True)
        return grow(branches, num_nodes, least_chance, self._ends)

    def _drafted(self, hidden: torch.Tensor, anchors: torch.Tensor) -> Drafted:
        """What the scorer's round begins with: the draft hidden states `[B, P, H]` after the anchors `[B, 1]`."""
        return Drafted(hidden, anchors)

    @abstractmethod
    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Store the new context, and draft hidden states `[B, P, H]` for the positions after anchors `[B, 1]`."""


class ContextSession(DraftSession):
    """A draft session that keeps the keys and values of context features for the blocks that it drafts.

    Hidden states of verified positions wait until the next draft stores them. If shapes are fixed, they only wait for a
    single round, so that what is stored has one shape.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Provides the embeddings and the lm_head.
        distribution ([`TokenDistribution`]): The distribution that draft tokens are chosen from.
        executor ([`Executor`], *optional*): Calls the functions of a round. If shapes are fixed, it has the context.
        context ([`ContextCache`], *optional*): The context of an earlier call, to continue from.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        distribution: TokenDistribution,
        executor: Executor | None = None,
        context: ContextCache | None = None,
    ):
        super().__init__(drafter, target, distribution, executor)
        self._cache: DraftContext = self.executor.context or context or drafter.new_context()
        self._device = drafter.device  # stored, because the property searches the drafter's parameters each time
        self._waiting: list[torch.Tensor] = []  # [B, C, L * H] each, hidden states that are not stored in the context
        self._num_waiting = 0  # how many columns they have together
        # For each sequence, the positions of its first waiting state and of the anchor. All between these are valid.
        self._starts: list[int] = []
        self._anchors: list[int] = []

    def observe(self, captured: Captured, length: int, mask: torch.Tensor | None = None) -> None:
        """Let the valid hidden states of a prompt wait, or store them now if shapes are fixed."""
        num_rows, num_new = captured[0].shape[:2]
        counts = [num_new] * num_rows
        starts = [length - num_new] * num_rows
        if mask is not None:
            num_before = max(mask.shape[1] - num_new, 0)
            starts = (mask[:, :num_before] != 0).sum(dim=1).tolist()
            are_valid = mask[:, num_before:] != 0
            counts = are_valid.sum(dim=1).tolist()
        if mask is not None and min(counts) < num_new:
            # Move the valid positions to the front, in order, because the context stores the first `counts` of each.
            order = are_valid.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, *counts)]
            captured = tuple(along(order, states) for states in captured)
        window = self.drafter.config.draft_window_size
        if window is not None and max(counts) > window:
            captured, kept = _last_of_each(window, captured, counts)
            starts = [start + count - left for start, count, left in zip(starts, counts, kept, strict=True)]
            counts = kept
        self.observe_block(captured, counts, starts)
        if not self._cache.max_waiting:  # prompts can have any length, so this does not run as a stage
            self.store_context(self._taken())

    def observe_block(self, captured: Captured, counts: Sequence[int], starts: Sequence[int] | None = None) -> None:
        """Let hidden states wait, of which the first `counts` of each sequence are valid.

        Args:
            captured (`tuple[torch.Tensor, ...]`): The hidden states of each of the L layers, `[B, C, H]`.
            counts (`Sequence[int]`): How many positions of each sequence are valid.
            starts (`Sequence[int]`, *optional*): The position of the first one. By default, it is that of the anchor.
        """
        cache = self._cache
        if self._waiting:
            # States of several rounds are stored together as long as all of them are valid in every sequence.
            fewest = min(end - start for start, end in zip(self._starts, self._anchors, strict=True))
            if not fewest == self._num_waiting < cache.max_waiting:
                self._store()
        joined = torch.cat([states.to(self._device) for states in captured], dim=-1)  # outlives the next verification
        joined = cache.needed(joined, counts)
        if self.executor.is_compiled and starts is None:
            missing = max(self.drafter.config.num_draft_tokens + 1 - joined.shape[1], 0)
            joined = torch.nn.functional.pad(joined, (0, 0, 0, missing))
        starts = self._anchors if starts is None else list(starts)
        if not self._waiting:
            self._starts = starts
        # The last token committed in each sequence is the next anchor, which the target has not processed yet.
        self._anchors = [start + count for start, count in zip(starts, counts, strict=True)]
        self._waiting.append(joined)
        self._num_waiting += joined.shape[1]
        cache.announce(self._starts, self._anchors, self._device)

    def context(self) -> ContextCache | None:
        """Store all context observed so far in the cache, and return the cache, or a copy that grows."""
        self._store()
        return self._cache.to_dynamic()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, in this order."""
        self._cache.select(rows)
        self._waiting = [states[list(rows)] for states in self._waiting]
        self._starts = [self._starts[row] for row in rows]
        self._anchors = [self._anchors[row] for row in rows]
        self._cache.announce(self._starts, self._anchors, self._device)

    def store_context(self, waiting: torch.Tensor) -> None:
        """Store the context features of hidden states `[B, C, L * H]` without drafting."""
        self.drafter.store(self._new_context(waiting), self._cache)

    def backbone(
        self,
        anchors: torch.Tensor,
        waiting: torch.Tensor | None,
        last_tokens: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Store the context features of hidden states `[B, C, L * H]`, and draft from the anchors `[B, 1]`."""
        cache = self._cache
        new = None if waiting is None else self._new_context(waiting)
        positions = _first(cache.ends, len(anchors))
        return self.drafter.draft(self.target, anchors, positions, new, cache, last_tokens)

    def _drafted(self, hidden: torch.Tensor, anchors: torch.Tensor) -> Drafted:
        return Drafted(hidden, anchors, _first(self._cache.ends, len(anchors)), self._cache)

    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Store the new context, and draft hidden states `[B, P, H]` for the positions after anchors `[B, 1]`."""
        assert self._anchors, "observe the context before proposing"
        if not self._waiting:
            config = self.drafter.config
            size = (len(anchors), 0, config.num_captured * config.hidden_size)
            self._waiting = [torch.empty(size, dtype=self.target.model.dtype, device=self._device)]
            self._cache.announce(self._anchors, self._anchors, self._device)
        return self.executor.run(self.backbone, *self._cache.draft_inputs(anchors, self._taken(), last_tokens))

    def _store(self) -> None:
        """Store the hidden states that wait, before the next draft."""
        if self._waiting:
            with self.executor.timer.phase("draft"):
                self.executor.run(self.store_context, self._taken())

    def _taken(self) -> torch.Tensor:
        """Take out the hidden states that wait, `[B, C, L * H]`."""
        if len(self._waiting) == 1:
            taken = self._waiting[0]
        else:
            taken = torch.cat(self._waiting, dim=1)
        self._waiting = []
        self._num_waiting = 0
        return taken

    def _new_context(self, waiting: torch.Tensor) -> NewContext:
        """The context features of hidden states, and their positions."""
        cache = self._cache
        positions = _first(cache.starts, len(waiting)) + torch.arange(waiting.shape[1], device=self._device)
        return NewContext(self.drafter.fuse_context([waiting]), positions, cache.new_counts)


def _first(values: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` values `[count, 1]`; buffers of fixed shape can have more."""
    if len(values) == count:
        return values
    return values[:count]


def _last_of_each(count: int, captured: Captured, counts: Sequence[int]) -> tuple[Captured, list[int]]:
    """Keep the last `count` of the valid positions of each sequence, which are the first `counts` in `[B, C, H]`."""
    kept = [min(count, number) for number in counts]
    starts = torch.tensor(counts) - torch.tensor(kept)
    columns = (starts[:, None] + torch.arange(count)).clamp_max(captured[0].shape[1] - 1).to(captured[0].device)
    return tuple(along(columns, states) for states in captured), kept
