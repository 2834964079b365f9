"""One generation's drafting where the drafter is a table of tokens, which the target fills on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.kinds.context import ContextCache


class TableSession(DraftSession):
    """Drafts without hidden states, and keeps no context."""

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Read no hidden states."""

    observe_block = observe

    def select(self, rows: Sequence[int]) -> None:
        """Do nothing: rows are told apart by their prefixes."""

    def context(self) -> ContextCache | None:
        """None."""
        return None

    def _draft(self, anchors: torch.Tensor, endings: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """One for each token of a path, `[B, P]`; nothing is read of them but how many there are."""
        return anchors.expand(-1, self.drafter.config.num_draft_tokens)
