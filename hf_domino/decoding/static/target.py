"""The target's side of a round of fixed shape: the verification forward as a stage, on a cache that never grows.

Shapes: P proposals, W positions of a verification forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches.alignment import PER_POSITION
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.round import fitting_length
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.static.workspace import Workspace, give_back
from hf_domino.decoding.tree.form import Tree, along
from hf_domino.decoding.tree.masks import tree_inputs
from hf_domino.target.view import TargetModel


def fitting_width(num_drafted: int, most: int) -> int:
    """Positions of the verification forward for `num_drafted` proposals: one of a few widths, so that few are captured.

    Args:
        num_drafted (`int`): Proposals to check, at most `most`.
        most (`int`): Proposals of a full round.
    """
    return 1 + fitting_length(num_drafted, most)


class StaticRunner(TargetRunner):
    """Runs the target on a cache of fixed shape; a round moves the cache's length and nothing else.

    Args:
        target ([`TargetModel`]): View of the target.
        session ([`DraftSession`]): For its drafter, whose workspace it is, and its timer.
        model_kwargs (`dict`): What `generate` prepared.
        workspace ([`Workspace`]): Cache and graphs.
        is_returned (`bool`): Whether the caller gets the cache: then it is a copy that grows.
    """

    is_fixed = True

    def __init__(
        self,
        target: TargetModel,
        session: DraftSession,
        model_kwargs: dict[str, Any],
        workspace: Workspace,
        is_returned: bool = False,
    ):
        super().__init__(target, model_kwargs | {CACHE: workspace.cache}, timer=session.timer)
        self._drafter, self._workspace, self._is_returned = session.drafter, workspace, is_returned
        self._most = session.drafter.config.num_draft_tokens
        self._length = 0  # of the cache, as its device knows it
        self._next_position = 0
        self._tensors: dict[str, torch.Tensor] = {}  # what every verification forward reads beside its block
        self._options: dict[str, Any] = {}
        self._key: Hashable = None

    def begin(self, rows: Sequence[int]) -> None:
        """Put what all rounds read where it stays."""
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

    def check_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Verification forward over the anchor `[1, 1]` and proposals `[1, P]`; a chain is filled up to a few widths.

        Returns:
            `tuple`: Logits `[1, P + 1, V]` and captured hidden states `[1, W, H]`.
        """
        num_checked, block = proposed.num_nodes + 1, torch.cat((anchors, proposed.tokens), dim=1)
        if proposed.parents is None:
            width, limit = fitting_width(proposed.num_nodes, self._most), self.target.position_limit
            if limit is not None and self._next_position + width > limit:
                width = num_checked  # what only fills up has no positions left
            inputs: tuple[torch.Tensor, ...] = (torch.nn.functional.pad(block, (0, width - num_checked)),)
        else:
            inputs = (block, proposed.depths, proposed.sees)
        with self._timer.phase("target_forward"):
            logits, *captured = self._workspace.graphs(self._key, self._verify, *inputs)
        return logits[:, :num_checked], tuple(captured)

    def _verify(
        self, block: torch.Tensor, depths: torch.Tensor | None = None, sees: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
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
        return (outputs.logits[:, -width:], *self.target.captured(outputs))

    def follow(self, path: torch.Tensor | None, captured: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
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
        """Keep the committed tokens in the cache: what is behind them is not there."""
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

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """A forward over the prompt, or part of it."""
        logits, captured = super()._forward(*args, **kwargs)
        self._move_to(self._length + captured[0].shape[1])
        return logits, captured

    def _move_to(self, length: int) -> None:
        self._length = length
        self._workspace.cache.length.fill_(length)
