"""Drafting by token recycling: drafts come from a table of likely successors, which the target's logits fill.

Shapes: B sequences, N proposals, P depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.tree import Tree


class RecyclingSession(DraftSession):
    """A draft session that drafts successors of successors, and learns from all verified tokens. It has no context."""

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because this method reads no hidden states and keeps nothing for a sequence."""

    observe_block = select = context = _take = observe

    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """The tokens before the anchors, `[B, P]`, in place of hidden states; the shape says how deep to draft."""
        assert last_tokens is not None
        return last_tokens(2)[:, :1].expand(-1, self.drafter.config.num_draft_tokens)

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:
        """Learn successors from the target's logits at all verified positions, including rejected ones."""
        with self.executor.timer.phase("draft"):
            tokens = torch.cat((prefixes.last(), proposals.tokens), dim=1)  # [B, N + 1]
            above = tokens[:, :-1]
            if proposals.parents is not None:
                above = tokens.gather(1, proposals.parents)
            before = torch.cat((prefixes.last_tokens(2)[:, :1], above), dim=1)
            self.drafter.learn(tokens.flatten(), before.flatten(), logits.flatten(0, 1))
