"""Drafting in rounds of fixed shape: backbone, and rollout or growth, as stages.

Shapes: P proposals, W positions of a verification forward, H hidden size, L captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.noise.steps import DraftNoise, OwnNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import Listener, rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.laws import FixedLaw
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.tree.growing import Grown, grow_tree
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.phases import PhaseTimer
from hf_domino.kinds.context import ContextCache
from hf_domino.target.view import TargetModel


class StaticDraftSession(DraftSession):
    """Drafts from a context of fixed shape.

    Args:
        drafter ([`DominoDraftModel`]): The drafter; not changed.
        target ([`TargetModel`]): View of the target.
        law ([`TokenLaw`]): What drafts are chosen from.
        timer ([`PhaseTimer`]): Times the stages.
        workspace ([`Workspace`]): Context and graphs.
    """

    def __init__(
        self, drafter: DominoDraftModel, target: TargetModel, law: TokenLaw, timer: PhaseTimer, workspace: Workspace
    ):
        super().__init__(drafter, target, law, timer)
        self._fixed, self._graphs = workspace.context, workspace.graphs
        ends = torch.tensor(sorted(law.stops.eos_token_ids), dtype=torch.long, device=workspace.device)
        self._ends = workspace.hold("ends", ends)
        self._law = FixedLaw(law, workspace)
        # [1, C, L * H], hidden states of positions that no drafted block has put into the context.
        self._pending: torch.Tensor | None = None

    def _take(self, captured: tuple[torch.Tensor, ...], position_ids: torch.Tensor, counts: list[int]) -> None:
        """Store the prompt, whatever its length."""
        self._fixed.announce(counts[0])
        self._backbone(position_ids[:, :0], self._joined(captured))

    def observe_block(self, captured: tuple[torch.Tensor, ...], counts: Sequence[int]) -> None:
        """Take the hidden states `[1, W, H]` of a verified block; the committed ones, the first, are valid."""
        self._store()
        self._pending = self._joined(captured)  # a copy: the next verification writes over them
        self._fixed.announce(counts[0])

    def _joined(self, captured: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([states.to(self.drafter.device) for states in captured], dim=-1)

    def _store(self) -> None:
        """Put into the context what no drafted block has put there."""
        if self._pending is not None:
            no_block = self._pending.new_zeros(1, 0, dtype=torch.long)
            with self.timer.phase("draft"):
                self._graphs("backbone", self._backbone, no_block, self._pending)

    def context(self) -> ContextCache:
        """A copy of all context observed so far."""
        self._store()
        return self._fixed.to_dynamic()

    def _draft(self, anchors: torch.Tensor, endings: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """Draft hidden states `[1, P, H]` behind the anchor `[1, 1]`; stores the new context."""
        pending = self._pending
        if pending is None:  # stored already: positions of which none is valid stand for it
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            width = self.drafter.config.num_draft_tokens + 1
            pending = torch.zeros(1, width, size, dtype=self.target.model.dtype, device=self.drafter.device)
            self._fixed.announce(0)
        self._pending = None
        return self._graphs("backbone", self._backbone, anchors, pending)[0]

    def _backbone(self, anchors: torch.Tensor, pending: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context = self._fixed
        positions = (context.start + torch.arange(pending.shape[1], device=self.drafter.device))[None]
        features = self.drafter.fuse_context([pending])
        return (
            self.drafter.kind.draft(self.target, anchors, context.length[None, None], features, positions, context),
        )

    def _choose(
        self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: DraftNoise | None, listener: Listener | None
    ) -> torch.Tensor:
        # What is told of every proposal is on the host; noise of its own comes with that.
        if self._law.key is None or listener is not None or isinstance(noise, OwnNoise):
            return super()._choose(draft_hidden, prefixes, noise, listener)
        inputs = (draft_hidden, self._law.text(prefixes)) + (() if noise is None else (noise,))
        return self._graphs(("rollout", self._law.key), self._rollout, *inputs)[0]

    def _rollout(
        self, draft_hidden: torch.Tensor, text: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        prefixes = self._law.prefixes(text)
        return (rollout(self.drafter, self.target, draft_hidden, prefixes, self.law, noise, is_fixed=True),)

    def _grow(
        self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: torch.Tensor | None, **options: Any
    ) -> Grown:
        """Trees of always as many nodes."""
        size = options["num_nodes"]
        if self._law.key is None:
            return self._tree(draft_hidden, prefixes, noise, size)
        inputs = (draft_hidden, self._law.text(prefixes)) + (() if noise is None else (noise,))
        stage = partial(self._grow_fixed, size)
        tokens, parents, chances = self._graphs(("grow", self._law.key, size), stage, *inputs)
        return Grown(Tree(tokens, parents, draft_hidden.shape[1]), chances)

    def _grow_fixed(
        self, size: int, draft_hidden: torch.Tensor, text: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        grown = self._tree(draft_hidden, self._law.prefixes(text), noise, size)
        assert grown.tree.parents is not None
        return grown.tree.tokens, grown.tree.parents, grown.chances

    def _tree(self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: torch.Tensor | None, size: int) -> Grown:
        return grow_tree(
            self.drafter,
            self.target,
            draft_hidden,
            prefixes,
            self.law,
            noise,
            num_nodes=size,
            ends=self._ends,
            is_fixed=True,
        )
