"""Kinds without weights, whose drafter is a table that the target fills while it generates."""

from __future__ import annotations

from typing import Any

import torch

from hf_domino.drafter.kinds.kind import Kind


class TableKind(Kind):
    """A kind that reads no hidden states. Its table is the drafter's: what one call has seen serves the next."""

    def fuse_context(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Not asked for. The same goes for what other kinds do with hidden states."""
        raise NotImplementedError(f"{self.config.kind.title} reads no hidden states")

    forward = draft = draft_blocks = fuse_context
