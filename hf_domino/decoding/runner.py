"""The target's side of a round: the prefill, the inputs of the verification forward, and the forward itself.

The target's keys and values are in a [`TargetCache`], of which there are two: Transformers' own layers, which grow
(`GrowingCache` in caches.py), and slots of fixed shape (`SlotCache` in static/slots.py). A runner is the same for both.

Shapes: B unfinished sequences, T prompt tokens, C new prompt positions or accepted positions, P proposals, W positions
of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches import TargetCache
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.static.batch_masks import batch_masks
from hf_domino.decoding.tree import Tree, tree_inputs
from hf_domino.methods.scorer import along
from hf_domino.targets.view import PER_POSITION, Captured, TargetModel


class TargetRunner:
    """Runs the target through `generate`'s own input preparation.

    Args:
        target ([`TargetModel`]): The target.
        model_kwargs (`dict`): The keyword arguments of its forward, as `generate` prepared them.
        storage ([`TargetCache`]): Where the target's keys and values are.
        executor ([`Executor`], *optional*): Calls the functions of a round.
        forward_kwargs (`Mapping`, *optional*): Further keyword arguments of every forward, such as
            `output_attentions=True`. With them, `outputs` are kept.
    """

    def __init__(
        self,
        target: TargetModel,
        model_kwargs: dict[str, Any],
        storage: TargetCache,
        executor: Executor | None = None,
        forward_kwargs: Mapping[str, bool] | None = None,
    ):
        self._executor = executor or Executor()
        self.target = target
        self.model: PreTrainedModel = target.model
        self.kwargs = model_kwargs
        self.storage = storage
        wanted = dict(forward_kwargs or {})
        self._forward_kwargs = wanted | target.capture_kwargs(capture_all=wanted.get("output_hidden_states", False))
        self._keeps_outputs = bool(wanted)
        self.outputs: Any = None  # those of the prompts' forward and, if wanted, of the last one
        self._device = torch.device("cpu")
        self.prompt_length = 0  # positions of the prompts, including padding and what was cached before
        self.prompt_mask: torch.Tensor | None = None  # which of them belong to a token, [B, T]; None if all do
        # What every verification forward reads besides its block: first what has one number for each sequence
        # `[..., B, 1]` (positions minus lengths, and token types), then everything else.
        self._of_sequences: dict[str, torch.Tensor] = {}
        self._options: dict[str, Any] = {}
        self._block = torch.empty(0)  # the last block, [B, W]
        self._key: Hashable = None  # what a captured forward depends on
        self._offsets: list[int] = []  # positions minus lengths on the host; empty if the target is not told positions

    @property
    def cache(self) -> Any:
        """The target's cache, as its forward takes it."""
        return self.storage.cache

    # --- the prompts ------------------------------------------------------------------------------------------------

    def prefill(
        self, input_ids: torch.Tensor, chunk_size: int | None = None, mask_length: int | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Process the last positions of the prompts `[B, T]`, those that the cache does not hold yet.

        Args:
            input_ids (`torch.Tensor`): The prompts.
            chunk_size (`int`, *optional*): How many positions to process at a time, which limits memory.
            mask_length (`int`, *optional*): Length of an attention mask that `generate` dropped because it was all
                ones.

        Returns:
            `tuple`: Logits `[B, 1, V]` of the next tokens, and captured hidden states `[B, C, H]`. If padding is not
            stored, the states of each prompt of a batch start with its first token, and those after its last token are
            meaningless.
        """
        self._device = input_ids.device  # the target's own can be `meta` if parts of it are offloaded
        self.storage.record()
        if self.storage.starts_differ:
            logits, captured, lengths = self._prefill_moved(input_ids)
        else:
            cached = int(self.cache.get_seq_length())
            new_length = self._uncached_length(input_ids, mask_length)
            if chunk_size is None or self.kwargs.get("inputs_embeds") is not None:
                logits, captured = self._prefill_at_once(input_ids, self.kwargs, new_length)
            else:
                logits, captured = self._prefill_in_chunks(input_ids[:, -(new_length or 0) :], chunk_size)
            lengths = [cached + captured[0].shape[1]] * len(logits)
            self.prompt_length = lengths[0]
            self.prompt_mask = self._mask(lengths[0])
        self.storage.begin(lengths, self.prompt_mask, self._device)
        return logits, captured

    def _prefill_at_once(
        self, input_ids: torch.Tensor, kwargs: dict[str, Any], new_length: int | None
    ) -> tuple[torch.Tensor, Captured]:
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new_length, is_first_iteration=True, **kwargs | {CACHE: self.cache}
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1
        outputs = self._prompts_forward(inputs)
        captured = self.target.captured(outputs)
        self.storage.check_forward(captured[0].shape[1])
        return outputs.logits[:, -1:].to(input_ids.device), captured

    def _prefill_in_chunks(self, new_ids: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, Captured]:
        total = int(self.cache.get_seq_length()) + new_ids.shape[1]
        pieces = []
        for chunk in new_ids.split(chunk_size, dim=1):
            end = int(self.cache.get_seq_length()) + chunk.shape[1]
            # Count from the right end, because masks and positions do not always cover what was cached before.
            behind = total - end
            kwargs = self.kwargs | {
                name: self.kwargs[name][..., : self.kwargs[name].shape[-1] - behind]
                for name in PER_POSITION
                if self.kwargs.get(name) is not None
            }
            logits, captured = self._prefill_at_once(chunk, kwargs, chunk.shape[1])
            self.storage.settle(end)
            pieces.append(captured)
        return logits, tuple(torch.cat(layers, dim=1) for layers in zip(*pieces, strict=True))

    def _prefill_moved(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, Captured, list[int]]:
        """Process prompts whose first tokens are moved to the first column; also return the prompts' lengths."""
        embeds = self.kwargs.get("inputs_embeds")
        if embeds is None:
            width = input_ids.shape[1]
        else:
            width = embeds.shape[1]
        mask = self._mask(width)
        if mask is None:
            mask = torch.ones(len(input_ids), width, dtype=torch.long, device=self._device)
        mask = (mask != 0).long()
        lengths = mask.sum(dim=1).tolist()
        order = mask.int().argsort(dim=1, descending=True, stable=True)  # moves each prompt's first token to the front
        kwargs = self.kwargs | {"attention_mask": None, CACHE: self.cache}
        for name in PER_POSITION[1:]:
            if (values := kwargs.get(name)) is not None:
                kwargs[name] = values.gather(-1, order.expand_as(values))
        if embeds is None:
            input_ids = input_ids.gather(1, order)
        else:
            kwargs["inputs_embeds"] = along(order, embeds)
        ends = torch.tensor(lengths, device=self._device) - 1
        inputs = self.model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs)
        kept, places = torch.unique(ends, return_inverse=True)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = kept
        if width == 1:  # without a mask, the only query would attend to all slots, empty ones too
            inputs["attention_mask"] = batch_masks(self.model, self.cache, torch.zeros_like(ends)[:, None], width)
        outputs = self._prompts_forward(inputs)
        if outputs.logits.shape[1] == len(kept):
            columns = places
        else:
            columns = ends
        self.prompt_length = width
        self.prompt_mask = torch.arange(width, device=self._device) <= ends[:, None]
        return along(columns[:, None], outputs.logits), self.target.captured(outputs), lengths

    def _prompts_forward(self, inputs: dict[str, Any]) -> Any:
        with self._executor.timer.phase("target_forward"):
            self.outputs = self.model(**(inputs | self._forward_kwargs))
        self.storage.adopt(getattr(self.outputs, CACHE, None))
        return self.outputs

    def _uncached_length(self, input_ids: torch.Tensor, mask_length: int | None) -> int | None:
        """How many of the prompt's last positions to process; None for all of them."""
        cached = self.cache.get_seq_length()
        mask = self.kwargs.get("attention_mask")
        if not cached:
            return None
        embeds = self.kwargs.get("inputs_embeds")
        if embeds is None:
            length = input_ids.shape[1]
        else:
            length = embeds.shape[1]
        # As in generate's own prefill, ids that are shorter than the mask are only the new ones.
        if mask is not None:
            mask_length = mask.shape[1]
        only_new = mask_length is not None and mask_length != length
        return None if only_new else length - cached

    def _mask(self, length: int) -> torch.Tensor | None:
        """The last columns `[B, length]` of the two-dimensional attention mask; None if there is no such mask."""
        mask = self.kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            return mask[:, -length:]
        return None

    def begin(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, after the prefill and the first new token of each, and what all rounds read."""
        lengths = self.storage.lengths
        # Some targets add options after the prompts. Afterwards, these stay the same (`check_steps`).
        self.kwargs = kwargs = self.model._update_model_kwargs_for_generation(
            self.outputs, dict(self.kwargs), is_encoder_decoder=False, num_new_tokens=1
        )
        self.outputs = None  # frees the prompts' outputs
        self._of_sequences = {}
        if (positions := kwargs.get("position_ids")) is not None:
            last = positions[..., -1:].expand(*positions.shape[:-2], len(lengths), 1)
            before = last - torch.tensor(lengths, device=last.device)[:, None]
            self._of_sequences["position_ids"] = self._executor.hold_for_each("position_ids", before)
            self._offsets = before.reshape(-1, len(lengths)).amax(dim=0).tolist()
        for name in PER_POSITION[2:]:  # token types, which are the same for all new tokens
            if (types := kwargs.get(name)) is not None:
                self._of_sequences[name] = self._executor.hold_for_each(name, types[..., -1:])
        taken = (*PER_POSITION, CACHE, "inputs_embeds", *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
        self._options = {
            name: self._executor.hold(f"option {name}", value) if isinstance(value, torch.Tensor) else value
            for name, value in kwargs.items()
            if name not in taken
        }
        names = [(name, "" if isinstance(v, torch.Tensor) else repr(v)) for name, v in self._options.items()]
        self._key = (*sorted(self._of_sequences), self.storage.starts_differ, *sorted(names))
        if rows and len(rows) < len(lengths):
            self.storage.keep([0] * len(lengths), 0, rows, self._run_again)
            self._select(rows)

    # --- a round ----------------------------------------------------------------------------------------------------

    def next_position(self) -> int:
        """The largest position that the next token of any sequence will have."""
        if not self._offsets:
            return self.storage.num_columns
        return max(offset + length for offset, length in zip(self._offsets, self.storage.lengths, strict=True))

    def forward_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Run the target on anchors `[B, 1]` and proposals; return logits `[B, W, V]` and captured hidden states."""
        num_checked = proposed.num_nodes + 1
        forward: Callable[..., tuple[torch.Tensor, Captured]] = self.target_forward
        self._block = torch.cat((anchors, proposed.tokens), dim=1)
        inputs: tuple[torch.Tensor, ...] = (self._block,)
        width = self.storage.open_block(num_checked)
        if proposed.parents is not None:
            width = num_checked
            inputs = (self._block, proposed.depths, proposed.sees)
        elif width > num_checked:
            limit = self.target.position_limit
            if limit is not None and self.next_position() + width > limit:
                width = num_checked  # there are no positions left for padding
                forward = self.forward_near_limit
            inputs = (torch.nn.functional.pad(self._block, (0, width - num_checked)),)
        with self._executor.timer.phase("target_forward"):
            logits, captured = self._executor.run(forward, *inputs, key=self._key)
        self.storage.check_forward(width)
        if width > num_checked:
            logits = logits[:, :num_checked]
        return logits, captured

    def forward_near_limit(self, block: torch.Tensor) -> tuple[torch.Tensor, Captured]:
        """Run the forward over a block of any width, uncompiled, because few blocks are this close to the limit."""
        return self.target_forward(block)

    def target_forward(
        self, block: torch.Tensor, depths: torch.Tensor | None = None, sees: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Run the forward over the block `[B, W]`; returns logits and captured hidden states."""
        outputs = self.model(**(self.block_inputs(block, depths, sees) | self._forward_kwargs))
        if self._keeps_outputs:
            self.outputs = outputs
        return outputs.logits[:, -block.shape[1] :].to(block.device), self.target.captured(outputs)

    def block_inputs(
        self, block: torch.Tensor, depths: torch.Tensor | None = None, sees: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """Make the target's inputs for a block `[B, W]`. After the prefill, nothing else makes positions and masks.

        Args:
            block (`torch.Tensor`): Anchors and proposals.
            depths (`torch.Tensor`, *optional*): The `depths` of a [`Tree`], `[B, W]`; None for a chain.
            sees (`torch.Tensor`, *optional*): The `sees` of a [`Tree`], `[B, W, W]`; None for a chain.
        """
        num_rows, width = block.shape
        storage = self.storage
        starts = storage.starts(num_rows)
        kwargs = dict(self._options)
        if (mask := storage.mask(width)) is not None:
            kwargs["attention_mask"] = mask
        for name, values in self._of_sequences.items():
            if values.shape[-2] != num_rows:
                values = values[..., :num_rows, :]
            if name == "position_ids":
                kwargs[name] = values + (starts + torch.arange(width, device=values.device))
            else:
                kwargs[name] = values.expand(*values.shape[:-2], num_rows, width)
        inputs = self.model.prepare_inputs_for_generation(
            block, next_sequence_length=width, **{CACHE: storage.cache}, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        start = None
        if not storage.ends_with_block:
            assert isinstance(starts, torch.Tensor)
            start = starts
        if storage.starts_differ:
            assert start is not None
            inputs["attention_mask"] = batch_masks(self.model, storage.cache, start, width)
        if depths is not None and sees is not None:
            inputs = tree_inputs(depths, sees, inputs, self.model, start)
        return inputs

    def commit(self, path: torch.Tensor | None, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Keep the committed positions in the cache; drop all others, and all sequences that are not in `rows`.

        Args:
            path (`torch.Tensor`, *optional*): The places of the committed positions in the block, `[B, C]`, beginning
                with the anchor's. It is None for a chain, whose accepted positions are at the front already.
            counts (`Sequence[int]`): How many positions each sequence keeps. The last token committed in each of them
                has not been through the target yet.
            num_checked (`int`): How many positions the block had.
            rows (`Sequence[int]`): The sequences that stay.
        """
        if path is not None:
            self.storage.follow(path, num_checked)
        rows = rows or ([0] if len(counts) == 1 else [])  # the cache of a single sequence can serve a later call
        self.storage.keep(counts, num_checked, rows, self._run_again)
        if 0 < len(rows) < len(counts):
            self._select(rows)

    def _run_again(self, count: int) -> None:
        """Run the first positions of the last block through the target once more."""
        inputs = self.block_inputs(self._block[:, :count])
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1
        with self._executor.timer.phase("target_forward"):
            self.model(**(inputs | self._forward_kwargs))
        self.storage.check_forward(count)

    def _select(self, rows: Sequence[int]) -> None:
        """Keep only these sequences in what belongs to each of them."""
        self._of_sequences = {name: self._executor.select(values, rows) for name, values in self._of_sequences.items()}
        if self._offsets:
            self._offsets = [self._offsets[row] for row in rows]
