"""Drafting with fixed shapes, so that the backbone can be captured: graphs find the context at a fixed address.

Shapes: B sequences still generated, C new context positions, P proposals, W positions of a verification forward, H
hidden size, L captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache, NewContext
from hf_domino.targets.view import Captured, TargetModel


class StaticDraftSession(DraftSession):
    """Drafts from a context of fixed shape."""

    executor: Workspace

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        distribution: TokenDistribution,
        workspace: Workspace,
    ):
        super().__init__(drafter, target, distribution, workspace)
        # [B, C, L * H], hidden states that the next draft stores in the context.
        self._pending: torch.Tensor | None = None

    def _take(self, captured: Captured, position_ids: torch.Tensor, counts: list[int]) -> None:
        """Store the context of the prompts. They can have any length, so this does not run as a stage."""
        if self.drafter.config.draft_window_size is not None:
            self.executor.context.begin_at(position_ids[:, 0].tolist())
        self.executor.context.announce(counts)
        self.store_context(self._joined(captured))

    def observe_block(self, captured: Captured, counts: Sequence[int]) -> None:
        """Take the hidden states `[B, W, H]` of a verified block; only the first `counts` (committed) are valid."""
        self._store()
        pending = self._joined(captured)  # a copy: the next verification overwrites the originals
        if self.executor.is_compiled:
            missing = max(self.drafter.config.num_draft_tokens + 1 - pending.shape[1], 0)
            pending = torch.nn.functional.pad(pending, (0, 0, 0, missing))
        self._pending = pending
        self.executor.context.announce(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, which move to the front of the context."""
        self.executor.context.select(rows)
        if self._pending is not None:
            self._pending = self._pending[list(rows)]

    def _joined(self, captured: Captured) -> torch.Tensor:
        return torch.cat([states.to(self.drafter.device) for states in captured], dim=-1)

    def _store(self) -> None:
        """Store pending hidden states in the context now, before the next draft."""
        if self._pending is not None:
            with self.executor.timer.phase("draft"):
                self.executor.run(self.store_context, self._pending)

    def store_context(self, pending: torch.Tensor) -> None:
        """Store the context features of pending hidden states without drafting."""
        self.drafter.store(self._new_context(pending), self.executor.context)

    def context(self) -> ContextCache:
        """Return a copy of all context observed so far."""
        self._store()
        return self.executor.context.to_dynamic()

    def _draft(self, anchors: torch.Tensor, last_tokens: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Compute draft hidden states `[B, P, H]` from the anchors `[B, 1]`, and store the new context."""
        pending = self._pending
        if pending is None:  # already stored: pass the usual number of positions, none of them valid
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            width = self.drafter.config.num_draft_tokens + 1
            shape = (len(anchors), width, size)
            pending = torch.zeros(shape, dtype=self.target.model.dtype, device=self.drafter.device)
            self.executor.context.announce([0] * len(anchors))
        self._pending = None
        return self.executor.run(self.backbone, anchors, pending)

    def backbone(self, anchors: torch.Tensor, pending: torch.Tensor) -> torch.Tensor:
        """Store the context features of pending hidden states, and return draft hidden states from the anchors."""
        context = self.executor.context
        ends = context.lengths[: len(pending), None]
        return self.drafter.draft(self.target, anchors, ends, self._new_context(pending), context)

    def _new_context(self, pending: torch.Tensor) -> NewContext:
        """The context features of pending hidden states, and their positions."""
        starts = self.executor.context.starts[: len(pending), None]
        positions = starts + torch.arange(pending.shape[1], device=self.drafter.device)
        return NewContext(self.drafter.fuse_context([pending]), positions)
