"""Both sides of a round of fixed shape, as stages: the target's forward, and backbone, rollout or growth.

The target's cache never grows: a round moves its length and nothing else.

Shapes: P proposals, W positions of a verification forward, H hidden size, L captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches import PER_POSITION
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.round import fitting_length
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.workspace import Workspace, give_back
from hf_domino.decoding.tree import Tree, along, tree_inputs
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache, NewContext
from hf_domino.statistics.phases import PhaseTimer
from hf_domino.target.view import Captured, TargetModel


class StaticRunner(TargetRunner):
    """Runs the target on a cache of fixed shape; a round moves the cache's length and nothing else."""

    is_fixed = True

    def __init__(
        self,
        target: TargetModel,
        drafter: DominoDraftModel,
        model_kwargs: dict[str, Any],
        timer: PhaseTimer,
        workspace: Workspace,
        is_returned: bool,  # whether the caller gets the cache: then it is a copy that grows
    ):
        super().__init__(target, model_kwargs | {CACHE: workspace.cache}, timer=timer)
        self._drafter, self._workspace, self._is_returned = drafter, workspace, is_returned
        self._most = drafter.config.num_draft_tokens
        self._length = 0  # of the cache, as its device knows it
        self._next_position = 0
        self._tensors: dict[str, torch.Tensor] = {}  # what every verification forward reads beside its block
        self._options: dict[str, Any] = {}
        self._key: Hashable = None

    def begin(self, rows: Sequence[int]) -> None:
        """Put what all rounds read where graphs find it."""
        hold = self._workspace.hold
        mask = torch.ones(1, self._workspace.capacity, dtype=torch.long, device=self._device)
        given = self.mask(self._length)
        if given is not None:
            mask[:, : self._length] = given
        kwargs, self.outputs = self._advanced(self.kwargs, 1), None  # a prompt's states are not held for the call
        self._tensors = {"attention_mask": hold("attention_mask", mask)}
        self._next_position = self._length
        if (positions := kwargs.get("position_ids")) is not None:
            self._tensors["position_ids"] = hold("position_ids", positions[..., -1:] - self._length)
            self._next_position = int(positions.max())
        for name in PER_POSITION[2:]:  # types, alike for all new tokens
            if (types := kwargs.get(name)) is not None:
                self._tensors[name] = hold(name, types[..., -1:])
        taken = (*PER_POSITION, CACHE, "inputs_embeds")
        self._options = {
            name: hold(f"option {name}", value) if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
            if name not in taken
        }
        names = [(name, "" if isinstance(v, torch.Tensor) else repr(v)) for name, v in self._options.items()]
        self._key = ("verify", *sorted(self._tensors), *sorted(names))

    def next_position(self) -> int:
        """The position of the next anchor."""
        return self._next_position

    def check_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Verify as [`TargetRunner.check_block`] does; a chain is filled up to one of a few widths (W)."""
        num_checked, block = proposed.num_nodes + 1, torch.cat((anchors, proposed.tokens), dim=1)
        if proposed.parents is None:
            width, limit = 1 + fitting_length(proposed.num_nodes, self._most), self.target.position_limit
            if limit is not None and self._next_position + width > limit:
                width = num_checked  # what only fills up has no positions left
            inputs: tuple[torch.Tensor, ...] = (torch.nn.functional.pad(block, (0, width - num_checked)),)
        else:
            inputs = (block, proposed.depths, proposed.sees)
        with self._timer.phase("target_forward"):
            logits, captured = self._workspace.graphs(self._key, self._verify, *inputs)
        return logits[:, :num_checked], captured

    def _verify(
        self, block: torch.Tensor, depths: torch.Tensor | None = None, sees: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """The forward over the block `[1, W]`: logits and captured hidden states. Writes behind the cache's length."""
        width = block.shape[1]
        kwargs = self._options | {"attention_mask": self._tensors["attention_mask"]}
        if (offset := self._tensors.get("position_ids")) is not None:
            kwargs["position_ids"] = offset + self.cache.length + torch.arange(width, device=block.device)
        for name in PER_POSITION[2:]:
            if (types := self._tensors.get(name)) is not None:
                kwargs[name] = types.expand(*types.shape[:-1], width)
        inputs = self.model.prepare_inputs_for_generation(
            block, next_sequence_length=width, **{CACHE: self.cache}, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        if depths is not None and sees is not None:
            inputs = tree_inputs(depths, sees, inputs, self.model, self.cache.length)
        outputs = self.model(**(inputs | self._forward_kwargs))
        return outputs.logits[:, -width:], self.target.captured(outputs)

    def follow(self, path: torch.Tensor | None, captured: Captured) -> Captured:
        """Move what was accepted of a tree to the front of its block; see [`TargetRunner.follow`]."""
        if path is None:
            return captured
        path = torch.nn.functional.pad(path.to(self._device), (0, self._most + 1 - path.shape[1]))
        cache, graphs = self._workspace.cache, self._workspace.graphs
        cache.reserve(path.shape[1])
        graphs("take", cache.take, path)
        graphs("put", cache.put)
        return tuple(along(path, states) for states in captured)

    def commit(self, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Move the cache's length behind the committed tokens; no forward reads what is behind it."""
        self._next_position += counts[0]
        self._move_to(self._length + counts[0])

    def end(self, batch_size: int) -> None:
        """Leave a cache that the caller can go on from, if it gets one."""
        if self._is_returned:
            config = self.model.config.get_text_config(decoder=True)
            self.kwargs[CACHE] = self._workspace.cache.to_dynamic(config)

    def release(self) -> None:
        """Leave the workspace to the next call."""
        give_back(self.model, self._drafter, self._workspace)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Captured]:
        """A forward over the prompt, or part of it."""
        logits, captured = super()._forward(*args, **kwargs)
        self._move_to(self._length + captured[0].shape[1])
        return logits, captured

    def _move_to(self, length: int) -> None:
        self._length = length
        self._workspace.cache.length.fill_(length)


class StaticDraftSession(DraftSession):
    """Drafts from a context of fixed shape."""

    def __init__(
        self, drafter: DominoDraftModel, target: TargetModel, law: TokenLaw, timer: PhaseTimer, workspace: Workspace
    ):
        super().__init__(drafter, target, law, timer)
        self._fixed, self._graphs = workspace.context, workspace.graphs
        ends = torch.tensor(sorted(law.stops.eos_token_ids), dtype=torch.long, device=workspace.device)
        self._ends, self._table = workspace.hold("ends", ends), None
        # [1, C, L * H], hidden states that the next drafted block puts into the context.
        self._pending: torch.Tensor | None = None

    def _take(self, captured: Captured, position_ids: torch.Tensor, counts: list[int]) -> None:
        """Store the prompt, which is of any length and no stage."""
        self._fixed.announce(counts[0])
        self._backbone(position_ids[:, :0], self._joined(captured))

    def observe_block(self, captured: Captured, counts: Sequence[int]) -> None:
        """Take the hidden states `[1, W, H]` of a verified block; the committed ones, the first, are valid."""
        self._store()
        self._pending = self._joined(captured)  # a copy: the next verification writes over them
        self._fixed.announce(counts[0])

    def _joined(self, captured: Captured) -> torch.Tensor:
        return torch.cat([states.to(self.drafter.device) for states in captured], dim=-1)

    def _store(self) -> None:
        """Put hidden states that wait for a drafted block into the context now."""
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
        if pending is None:  # stored already: as many positions as ever, none of them valid
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            width = self.drafter.config.num_draft_tokens + 1
            pending = torch.zeros(1, width, size, dtype=self.target.model.dtype, device=self.drafter.device)
            self._fixed.announce(0)
        self._pending = None
        return self._graphs("backbone", self._backbone, anchors, pending)

    def _backbone(self, anchors: torch.Tensor, pending: torch.Tensor) -> torch.Tensor:
        context = self._fixed
        positions = (context.start + torch.arange(pending.shape[1], device=self.drafter.device))[None]
        features = self.drafter.fuse_context([pending])
        new = NewContext(features, positions)
        return self.drafter.draft(self.target, anchors, context.length[None, None], new, context)
