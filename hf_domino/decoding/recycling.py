"""Drafting by token recycling: drafts come from a table of likely successors, which the target's logits fill.

There is no context, so one session serves rounds that grow and rounds of fixed shape. The latter capture three stages:
growing the tree, learning from the logits of a verified block, and writing what was learnt into the table.

After a token that has not been seen before, there is nothing to propose. If the host does not read the tree, it tells
from the committed tokens which tokens have been seen, and such a round is a plain decode step.

Shapes: B sequences, N proposals, P depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.tree import Tree
from hf_domino.targets.view import Captured


class RecyclingSession(DraftSession):
    """A draft session that drafts successors of successors, and learns from all verified tokens. It has no context."""

    _is_known: Any = None  # which tokens have been seen, `[V]` bool on the host, if the host does not read the table

    def observe(self, captured: Captured, length: int, mask: torch.Tensor | None = None) -> None:
        """Read once which tokens have been seen before this call. No hidden states are read."""
        if not self.reads_host or self.drafter.device.type != "cpu":
            best = self.drafter.scores[: self.drafter.config.vocab_size, 0]
            self._is_known = (best > -torch.inf).cpu().numpy()

    def observe_block(self, captured: Captured, counts: Sequence[int]) -> None:
        """Do nothing, because no hidden states are read."""

    def context(self) -> None:
        """Return None, because no context is kept."""

    def select(self, rows: Sequence[int]) -> None:
        """Do nothing, because nothing is kept for a sequence."""

    def propose(
        self,
        prefixes: Prefixes,
        most: int,
        noise: torch.Tensor | None = None,
        num_nodes: int | None = None,
        least_chance: float = 0.0,
    ) -> Tree:
        """Draft as [`DraftSession.propose`] does, or propose nothing if no anchor has been seen."""
        if self._is_known is not None:
            ends = zip(prefixes.rows, prefixes.lengths, strict=True)
            anchors = [self.read(row, length - 1)[0] for row, length in ends]
            if not self._is_known[anchors].any():
                return Tree(prefixes.ids[:, :0])
        return super().propose(prefixes, most, noise, num_nodes, least_chance)

    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """The tokens before the anchors, `[B, P]`, in place of hidden states; the shape says how deep to draft."""
        assert last_tokens is not None
        return last_tokens(2)[:, :1].expand(-1, self.drafter.config.num_draft_tokens)

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:
        """Learn successors from the target's logits at all verified positions, including rejected ones."""
        with self.executor.timer.phase("draft"):
            learnt = self.executor.run(self.learn_block, prefixes.last_tokens(2), proposals, logits)
            self.executor.run(self.drafter.keep, *learnt)
        if self._is_known is not None:
            for row, length in zip(prefixes.rows, prefixes.lengths, strict=True):
                verified = self.read(row, length - 1)[:-1]  # without the bonus token
                self._is_known[verified] = True

    def learn_block(self, last: torch.Tensor, proposals: Tree, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Learn from the block after the last two tokens `[B, 2]`; returns what to keep, tensors `[B, N + 1, ...]`."""
        tokens = torch.cat((last[:, 1:], proposals.tokens), dim=1)  # [B, N + 1]
        above = tokens[:, :-1]
        if proposals.parents is not None:
            above = tokens.gather(1, proposals.parents)
        before = torch.cat((last[:, :1], above), dim=1)
        learnt = self.drafter.learn(tokens.flatten(), before.flatten(), logits.flatten(0, 1))
        return tuple(each.unflatten(0, tokens.shape) for each in learnt)
