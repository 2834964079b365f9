"""One generation's drafting by token recycling: a table of successors, which the target fills on the way.

Shapes: B batch, L branches, M successors, N proposals, C depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_domino.decoding.branches import Candidates, DraftBranches
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.tree import Tree


class RecyclingSession(DraftSession):
    """Drafts the successors of successors, and learns from all that is verified; it keeps nothing of a text."""

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it reads no hidden states, and prefixes tell rows apart."""

    observe_block = select = context = _take = observe

    def _draft(self, anchors: torch.Tensor, endings: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """One for each token of a path, `[B, P]`; nothing is read of them but how many there are."""
        return anchors.expand(-1, self.drafter.config.num_draft_tokens)

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:
        """Take what the target made of all positions, rejected ones too."""
        with self.executor.timer.phase("draft"):
            tokens = torch.cat((prefixes.last(), proposals.tokens), dim=1)
            self.drafter.learn(tokens.flatten(), logits.flatten(0, 1))

    def _branches_of(self, *arguments: Any) -> DraftBranches:
        return SuccessorBranches(self.drafter, self.target, *arguments)


class SuccessorBranches(DraftBranches):
    """Branches whose candidates are the likeliest successors of their last tokens, as the target gave them last."""

    def candidates(self, depth: int) -> Candidates:
        """Give what may come next. Of logits processors, these scores follow the temperature alone."""
        if depth:
            last = self.texts[..., -1]
        else:
            last = self.prefixes.last()
        noise = None
        token_ids, scores = self._drafter.successors_of(last)
        if self._noise is not None:
            noise = self._noise[:, depth].gather(1, token_ids.flatten(1)).view(token_ids.shape)
        return scores / self.distribution.temperature, noise, token_ids
