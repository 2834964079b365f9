"""The target's side of a round of fixed shape, whose forward can be captured.

The target's cache never grows: a round only moves its lengths.

Shapes: B sequences still generated, T prompt positions, P proposals, W positions of a verification forward, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches import PER_POSITION
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.round import fitting_length
from hf_domino.decoding.runner import TargetRunner, shortened_cache
from hf_domino.decoding.static.batch_masks import batch_masks
from hf_domino.decoding.static.fixed_caches import compact, set_first
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.tree import Tree, tree_inputs
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.scorer import along
from hf_domino.targets.attention import unrepeated_keys
from hf_domino.targets.view import Captured, TargetModel


class StaticRunner(TargetRunner):
    """Runs the target on a cache of fixed shape; a round only moves the cache's lengths."""

    _executor: Workspace

    def __init__(
        self,
        target: TargetModel,
        drafter: DominoDraftModel,
        model_kwargs: dict[str, Any],
        workspace: Workspace,
        is_returned: bool,  # whether the caller gets a cache, which is a copy that grows
        room: tuple[int, int],  # positions of the largest block, and of the longest text with it
    ):
        super().__init__(target, model_kwargs | {CACHE: workspace.cache}, workspace)
        self._is_returned = is_returned
        self._widest, self._longest = room
        self._most = drafter.config.num_draft_tokens
        self._host_lengths: list[int] = []  # slots that each sequence fills: the host's copy of the cache's lengths
        self._next_positions: list[int] = []
        self._prompt_mask: torch.Tensor | None = None  # only for a batch
        self._tensors: dict[str, torch.Tensor] = {}  # what every verification forward reads besides its block
        self._options: dict[str, Any] = {}
        self._key: Hashable = None

    def prefill(
        self, input_ids: torch.Tensor, chunk_size: int | None = None, mask_length: int | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Process the prompts `[B, T]`; in a batch, their left padding is removed.

        Returns:
            `tuple`: Logits `[B, 1, V]` of the next tokens, and captured hidden states. In a batch, the states of each
            prompt start with its first token, and those after its last token are meaningless.
        """
        self._device = input_ids.device
        self._host_lengths = [0] * len(input_ids)
        if len(input_ids) == 1:
            logits, captured = super().prefill(input_ids, chunk_size, mask_length)
        else:
            logits, captured = self._prefill_batch(input_ids)
        if (found := self._executor.cache.num_slots()) < self._executor.capacity:
            raise shortened_cache(self._executor.capacity, found)
        return logits, captured

    def _prefill_batch(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, Captured]:
        self._executor.cache.is_batch = True
        embeds = self.kwargs.get("inputs_embeds")
        if embeds is None:
            width = input_ids.shape[1]
        else:
            width = embeds.shape[1]
        mask = self.mask(width)
        if mask is None:
            mask = torch.ones(len(input_ids), width, dtype=torch.long, device=self._device)
        mask = (mask != 0).long()
        lengths = mask.sum(dim=1).tolist()
        order = mask.int().argsort(dim=1, descending=True, stable=True)  # moves each prompt's first token to the front
        kwargs = dict(self.kwargs) | {"attention_mask": None}
        for name in PER_POSITION[1:]:
            if (values := kwargs.get(name)) is not None:
                kwargs[name] = values.gather(-1, order.expand_as(values))
        if embeds is None:
            input_ids = input_ids.gather(1, order)
        else:
            kwargs["inputs_embeds"] = along(order, embeds)
        ends = torch.tensor(lengths, device=self._device) - 1
        logits, captured = self._forward_prompts(input_ids, width, kwargs, ends)
        self._move_to(lengths)
        self._prompt_mask = torch.arange(mask.shape[1], device=self._device) <= ends[:, None]
        return logits, captured

    def _forward_prompts(
        self, input_ids: torch.Tensor, width: int, kwargs: dict[str, Any], ends: torch.Tensor
    ) -> tuple[torch.Tensor, Captured]:
        """Run the forward over prompts that start in the first column; returns logits at their last tokens `ends`."""
        inputs = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        kept, places = torch.unique(ends, return_inverse=True)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = kept
        if width == 1:  # without a mask, the only query would attend to all slots, empty ones too
            inputs["attention_mask"] = batch_masks(self.model, self.cache, torch.zeros_like(ends)[:, None], width)
        with self._executor.timer.phase("target_forward"):
            outputs = self.model(**(inputs | self._forward_kwargs))
        self.outputs = outputs
        if outputs.logits.shape[1] == len(kept):
            columns = places
        else:
            columns = ends
        return along(columns[:, None], outputs.logits), self.target.captured(outputs)

    def prompt_mask(self, length: int) -> torch.Tensor | None:
        """Return which of the prompts' hidden states belong to a token, `[B, length]`."""
        if self._prompt_mask is None:
            return self.mask(length)
        return self._prompt_mask

    def begin(self, rows: Sequence[int]) -> None:
        """Put everything that all rounds read where graphs find it."""
        hold = self._executor.hold
        device = self._device
        given = self.mask(self._host_lengths[0])  # before `_advanced` extends it
        # The prompt's outputs are freed afterwards, rather than held for the whole call.
        kwargs = self._advanced(self.kwargs, 1)
        self.outputs = None
        ends = torch.tensor(self._host_lengths, device=device)[:, None]
        self._tensors = {}
        if self._prompt_mask is None:
            mask = torch.ones(1, self._executor.capacity, dtype=torch.long, device=device)
            if given is not None:
                mask[:, : self._host_lengths[0]] = given
            self._tensors["attention_mask"] = hold("attention_mask", mask)
        self._next_positions = list(self._host_lengths)
        if (positions := kwargs.get("position_ids")) is not None:
            last = positions[..., -1:].expand(*positions.shape[:-2], len(self._host_lengths), 1)
            self._tensors["position_ids"] = self._hold_rows("position_ids", last - ends)
            self._next_positions = last.reshape(-1, len(self._host_lengths)).amax(dim=0).tolist()
        for name in PER_POSITION[2:]:  # token types, which are the same for all new tokens
            if (types := kwargs.get(name)) is not None:
                self._tensors[name] = self._hold_rows(name, types[..., -1:])
        taken = (*PER_POSITION, CACHE, "inputs_embeds", *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
        self._options = {
            name: hold(f"option {name}", value) if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
            if name not in taken
        }
        names = [(name, "" if isinstance(v, torch.Tensor) else repr(v)) for name, v in self._options.items()]
        self._key = (*sorted(self._tensors), *sorted(names))
        self._select(rows)

    def _hold_rows(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Keep one number per sequence `[..., B, 1]` where graphs find it, padded to as many as the buffers hold."""
        missing = self._executor.num_rows - values.shape[-2]
        return self._executor.hold(name, torch.nn.functional.pad(values, (0, 0, 0, missing)))

    def _select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, which move to the front of all buffers."""
        if not rows or len(rows) == len(self._host_lengths):
            return
        self._executor.cache.select(rows)
        # Padding sequences stay at position 0, which every target has.
        self._executor.cache.lengths[len(rows) :].zero_()
        for name, values in self._tensors.items():
            if name != "attention_mask":
                compact([values], rows, dim=values.dim() - 2)
        self._host_lengths = [self._host_lengths[row] for row in rows]
        self._next_positions = [self._next_positions[row] for row in rows]

    def next_position(self) -> int:
        """The largest position of the next anchors."""
        return max(self._next_positions)

    def reserve(self, prefixes: Prefixes) -> None:
        """Make room for the next block of each sequence; buffers that move are those of all rounds from here on."""
        num_positions = max(*self._host_lengths, *prefixes.lengths) + self._widest
        if self._executor.reserve(num_positions, self._longest) and self._prompt_mask is None:
            mask = self._tensors["attention_mask"]
            mask = torch.nn.functional.pad(mask, (0, self._executor.capacity - mask.shape[1]), value=1)
            self._tensors["attention_mask"] = self._executor.hold("attention_mask", mask)

    def forward_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Verify as [`TargetRunner.forward_block`] does; a chain is padded to one of a few widths (W)."""
        num_checked = proposed.num_nodes + 1
        block = torch.cat((anchors, proposed.tokens), dim=1)
        forward: Callable[..., tuple[torch.Tensor, Captured]] = self.target_forward
        if proposed.parents is None:
            # Prompt lookup can propose as many tokens as a tree has.
            most = self._most if proposed.num_nodes <= self._most else self._widest - 1
            if self._executor.is_compiled:  # few widths; wider blocks read the same weights
                width = 1 + most
            else:
                width = 1 + fitting_length(proposed.num_nodes, most)
            limit = self.target.position_limit
            if limit is not None and self.next_position() + width > limit:
                width = num_checked  # there are no positions left for padding
                forward = self.forward_near_limit
            inputs: tuple[torch.Tensor, ...] = (torch.nn.functional.pad(block, (0, width - num_checked)),)
        else:
            inputs = (block, proposed.depths, proposed.sees)
        self._executor.cache.begin_forward()
        with self._executor.timer.phase("target_forward"), unrepeated_keys(self._device):
            logits, captured = self._executor.run(forward, *inputs, key=self._key)
        return logits[:, :num_checked], captured

    def forward_near_limit(self, block: torch.Tensor) -> tuple[torch.Tensor, Captured]:
        """Run the forward over a block of any width, uncompiled, because few blocks are this close to the limit."""
        return self.target_forward(block)

    def target_forward(
        self, block: torch.Tensor, depths: torch.Tensor | None = None, sees: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Run the forward over the block `[B, W]`; returns logits and captured hidden states.

        The forward writes after the cache's lengths.
        """
        num_rows, width = block.shape
        lengths = self.cache.lengths[:num_rows, None]
        kwargs = dict(self._options)
        if (mask := self._tensors.get("attention_mask")) is not None:
            kwargs["attention_mask"] = mask
        if (offset := self._tensors.get("position_ids")) is not None:
            places = lengths + torch.arange(width, device=block.device)
            kwargs["position_ids"] = offset[..., :num_rows, :] + places
        for name in PER_POSITION[2:]:
            if (types := self._tensors.get(name)) is not None:
                kwargs[name] = types[..., :num_rows, :].expand(*types.shape[:-2], num_rows, width)
        inputs = self.model.prepare_inputs_for_generation(
            block, next_sequence_length=width, **{CACHE: self.cache}, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        if self.cache.is_batch:
            inputs["attention_mask"] = batch_masks(self.model, self.cache, lengths, width)
        if depths is not None and sees is not None:
            inputs = tree_inputs(depths, sees, inputs, self.model, lengths)
        outputs = self.model(**(inputs | self._forward_kwargs))
        return outputs.logits[:, -width:], self.target.captured(outputs)

    def follow(self, path: torch.Tensor | None, captured: Captured) -> Captured:
        """Move the accepted path of a tree to the front of its block; see [`TargetRunner.follow`]."""
        if path is None:
            return captured
        path = torch.nn.functional.pad(path.to(self._device), (0, self._most + 1 - path.shape[1]))
        cache = self._executor.cache
        cache.reserve(path.shape[1])
        self._executor.run(cache.take, path)
        self._executor.run(cache.put, path)
        return tuple(along(path, states) for states in captured)

    def commit(self, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Move the cache's lengths past the committed tokens; no forward reads anything after the lengths."""
        pairs = zip(self._next_positions, counts, strict=True)
        self._next_positions = [position + count for position, count in pairs]
        self._move_to([length + count for length, count in zip(self._host_lengths, counts, strict=True)])
        self._select(rows)

    def end(self, batch_size: int) -> None:
        """Leave a cache that the caller can continue from, if the caller gets one."""
        if not self._is_returned:
            return
        config = self.model.config.get_text_config(decoder=True)
        if batch_size == 1:
            self.kwargs[CACHE] = self._executor.cache.to_dynamic(config)
        else:  # empty, like the cache that a growing batch leaves
            self.kwargs[CACHE] = DynamicCache(config=config)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Captured]:
        """Run a forward over one prompt, or a part of it."""
        logits, captured = super()._forward(*args, **kwargs)
        self._move_to([self._host_lengths[0] + captured[0].shape[1]])
        return logits, captured

    def _move_to(self, lengths: list[int]) -> None:
        self._host_lengths = lengths
        set_first(self._executor.cache.lengths, lengths)
