"""The target's side of a round: prefill, the verification forward, and its cache.

`TargetRunner` is what the loop knows. `GrowingRunner` has a cache that grows, and rewinds it after each round; with
fixed shapes, `StaticRunner` (static/runner.py) takes its place.

Shapes: B rows still generated, T prompt tokens, P proposals, V vocabulary.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches import (
    PER_POSITION,
    PLACEHOLDERS,
    Alignment,
    StateSnapshot,
    activate_past_recording,
    attention_kind,
    crop_attention,
    empty,
    end_past_recording,
    move_forward,
    recurrent_layers,
)
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.tree import Tree, along, tree_inputs
from hf_domino.target.attention import unrepeated_keys
from hf_domino.target.view import Captured, TargetModel


class TargetRunner(ABC):
    """Runs the target through `generate`'s own input preparation.

    Args:
        target ([`TargetModel`]): The target.
        model_kwargs (`dict`): The keyword arguments of its forward, as `generate` prepared them.
        executor ([`Executor`], *optional*): Calls the functions of a round.
        forward_kwargs (`Mapping`, *optional*): What else to ask the forwards for.
    """

    def __init__(
        self,
        target: TargetModel,
        model_kwargs: dict[str, Any],
        executor: Executor | None = None,
        forward_kwargs: Mapping[str, bool] | None = None,
    ):
        self._executor = executor or Executor()
        self.target = target
        self.model: PreTrainedModel = target.model
        self.kwargs = model_kwargs
        wanted = dict(forward_kwargs or {})
        self._forward_kwargs = wanted | target.capture_kwargs(capture_all=wanted.get("output_hidden_states", False))
        self.outputs: Any = None  # of the last forward
        self._device = torch.device("cpu")
        # A sliding-window layer forgets what it would need to step back, unless told beforehand.
        activate_past_recording(self.cache)

    @property
    def cache(self) -> Any:
        """The target's cache."""
        return self.kwargs[CACHE]

    def prefill(
        self, input_ids: torch.Tensor, chunk_size: int | None = None, mask_length: int | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Process the prompt `[B, T]`, less what the cache already holds, which are the last C positions."""
        # Gives logits [B, 1, V] of the next token, and captured hidden states [B, C, H]. Chunks bound the memory. The
        # length is that of an attention mask which is not there, as it was all ones.
        self._device = input_ids.device  # the target's own may be meta, where parts of it are offloaded
        new_length = self._uncached_length(input_ids, mask_length)
        if chunk_size is None or self.kwargs.get("inputs_embeds") is not None:
            logits, captured = self._forward(input_ids, self.kwargs, new_length, 1, is_first_iteration=True)
        else:
            logits, captured = self._prefill_in_chunks(input_ids[:, -(new_length or 0) :], chunk_size)
        return logits, captured

    def _prefill_in_chunks(self, new_ids: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, Captured]:
        total = int(self.cache.get_seq_length()) + new_ids.shape[1]
        pieces = []
        for chunk in new_ids.split(chunk_size, dim=1):
            end = int(self.cache.get_seq_length()) + chunk.shape[1]
            # Cut from the right: masks and positions may or may not cover what was cached before.
            behind = total - end
            kwargs = self.kwargs | {
                name: self.kwargs[name][..., : self.kwargs[name].shape[-1] - behind]
                for name in PER_POSITION
                if self.kwargs.get(name) is not None
            }
            logits, captured = self._forward(chunk, kwargs, chunk.shape[1], 1, is_first_iteration=True)
            crop_attention(self.cache, end)  # sliding-window layers shrink back to their window
            pieces.append(captured)
        return logits, tuple(torch.cat(layers, dim=1) for layers in zip(*pieces, strict=True))

    def _uncached_length(self, input_ids: torch.Tensor, mask_length: int | None) -> int | None:
        """How many of the prompt's last positions to process; None for all it has."""
        cached = self.cache.get_seq_length()
        mask = self.kwargs.get("attention_mask")
        if not cached:
            return None
        embeds = self.kwargs.get("inputs_embeds")
        if embeds is None:
            length = input_ids.shape[1]
        else:
            length = embeds.shape[1]
        # As generate's own prefill: ids shorter than the mask are the new ones only.
        if mask is not None:
            mask_length = mask.shape[1]
        only_new = mask_length is not None and mask_length != length
        return None if only_new else length - cached

    @property
    def sliding_windows(self) -> list[int | None]:
        """Window of each of the target's layers with attention; None where all positions are seen."""
        layers = [layer for layer in self.cache.layers if not isinstance(layer, PLACEHOLDERS)]
        windows = [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers]
        kinds = getattr(self.target.text_config, "layer_types", None) or []
        # The last layers may keep nothing: they use the keys of the last ones of their kind that do.
        window_of = dict(zip(kinds, windows, strict=False))
        attending = [window for layer, window in zip(layers, windows, strict=True) if attention_kind(layer) is not None]
        return attending + [window_of.get(kind) for kind in kinds[len(windows) :]]

    def mask(self, length: int) -> torch.Tensor | None:
        """The last columns `[B, length]` of the two-dimensional attention mask, where there is one."""
        mask = self.kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            return mask[:, -length:]
        return None

    @property
    def prompt_length(self) -> int:
        """Positions of the cache behind the prompts, padding included."""
        return int(self.cache.get_seq_length())

    def prompt_mask(self, length: int) -> torch.Tensor | None:
        """The attention mask `[B, length]` of the prompts, where there is one."""
        return self.mask(length)

    @abstractmethod
    def next_position(self) -> int:
        """The largest position that any row is about to take."""

    @abstractmethod
    def begin(self, rows: Sequence[int]) -> None:
        """Go on with these rows, after prefill and the first new token of each."""

    @abstractmethod
    def forward_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Run the target over anchors `[B, 1]` and proposals: logits `[B, W, V]` and captured hidden states."""

    @abstractmethod
    def follow(self, path: torch.Tensor | None, captured: Captured) -> Captured:
        """Move what was accepted of the block to its front, where a chain has it, and give its hidden states."""
        # The path has its places in the block, [B, C], the anchor's first; None for a chain.

    @abstractmethod
    def commit(self, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Keep each row's committed tokens in the cache, and drop other positions and the rows that do not go on."""
        # Of the tokens committed in each row, the last one has not been through the target.

    @abstractmethod
    def end(self, batch_size: int) -> None:
        """Leave a cache that `generate` can go on from: of a single sequence, less what a broken-off round has left."""

    def _advanced(self, kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        # Of a text's types the last one goes on token by token, and the last few do at once.
        if kwargs.get("token_type_ids") is None:
            steps = [num_tokens]
        else:
            steps = [1] * num_tokens
        for count in steps:
            kwargs = self.model._update_model_kwargs_for_generation(
                self.outputs, kwargs, is_encoder_decoder=False, num_new_tokens=count
            )
        return kwargs

    def _forward(
        self,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
        new_length: int | None,
        logits_to_keep: int,
        is_first_iteration: bool,
        arrange: Callable[[dict[str, Any], PreTrainedModel], dict[str, Any]] | None = None,
    ) -> tuple[torch.Tensor, Captured]:
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new_length, is_first_iteration=is_first_iteration, **kwargs
        )
        if arrange is not None:
            inputs = arrange(inputs, self.model)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        with self._executor.timer.phase("target_forward"):
            outputs = self.model(**(inputs | self._forward_kwargs))
        if is_first_iteration and not self.cache.get_seq_length():  # Phi-3 starts a new one for long prompts
            self.kwargs[CACHE] = getattr(outputs, CACHE)
            activate_past_recording(self.cache)
        self.outputs = outputs
        logits = outputs.logits[:, -logits_to_keep:].to(input_ids.device)
        return logits, self.target.captured(outputs)


class GrowingRunner(TargetRunner):
    """Keeps the target's cache at the committed tokens: after a round it drops what was rejected."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._lengths: list[int] = []  # per row: cached positions, left padding not counted
        self._checked: dict[str, Any] = {}  # kwargs of the last verification forward
        self._snapshot: StateSnapshot | None = None
        self._block: torch.Tensor | None = None  # anchor and proposals of the last verification forward
        self._settled = 0  # positions of the cache that are certain to stay

    def prefill(
        self, input_ids: torch.Tensor, chunk_size: int | None = None, mask_length: int | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Process the prompts, and note how long they are."""
        logits, captured = super().prefill(input_ids, chunk_size, mask_length)
        cached = int(self.cache.get_seq_length())
        mask = self.mask(cached)
        if mask is None:
            padding = [0] * len(logits)
        else:
            padding = mask.bool().int().argmax(dim=1).tolist()
        self._lengths = [cached - count for count in padding]
        self._settled = cached
        return logits, captured

    def next_position(self) -> int:
        """By the positions that `generate` counts, or by what is cached."""
        positions = self.kwargs.get("position_ids")
        if positions is None:
            return self.cache.get_seq_length()
        return int(positions.max())

    def begin(self, rows: Sequence[int]) -> None:
        """Realign the batch where rows are done after their first token."""
        if not rows or len(rows) == len(self._lengths):
            self.kwargs = self._advanced(self.kwargs, 1)
        else:
            self._lengths = [self._lengths[row] for row in rows]
            self._align(Alignment(rows, [0] * len(rows), self._lengths), self.kwargs)

    def forward_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Verify behind the cached positions; states that cannot be rewound are copied before."""
        width = proposed.num_nodes + 1
        if width > 1:
            self._checked = self._advanced(copy.copy(self.kwargs), width - 1)
        else:
            self._checked = self.kwargs
        self._block = torch.cat((anchors, proposed.tokens), dim=1)
        if recurrent_layers(self.cache):
            self._snapshot = StateSnapshot(self.cache)
        else:
            self._snapshot = None
        with unrepeated_keys(self._device):
            return self._forward(
                self._block,
                self._checked,
                width,
                logits_to_keep=width,
                is_first_iteration=False,
                arrange=None if proposed.parents is None else partial(tree_inputs, proposed.depths, proposed.sees),
            )

    def follow(self, path: torch.Tensor | None, captured: Captured) -> Captured:
        """Move the keys and values of an accepted path to the front of the block."""
        if path is not None and path.is_cpu:
            in_place = torch.arange(path.shape[1]).expand_as(path)
        else:
            in_place = None
        if path is not None and (in_place is None or not torch.equal(path, in_place)):
            assert self._block is not None
            move_forward(self.cache, path, self._block.shape[1])
        return tuple(along(path, states) for states in captured)

    def commit(self, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Rewind all rows together where they keep equally many tokens; else realign them."""
        lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        rows = rows or ([0] if len(counts) == 1 else [])  # a single sequence leaves a cache to go on with
        if len(rows) == len(counts) and min(counts) == max(counts):
            self._rewind(counts[0], num_checked)
            self.kwargs = self._advanced(self.kwargs, counts[0])
        elif rows:
            dropped = [num_checked - counts[row] for row in rows]
            self._align(Alignment(rows, dropped, [lengths[row] for row in rows]), self._checked)
        self._lengths = [lengths[row] for row in rows]
        self._settled = self.cache.get_seq_length()
        self._snapshot = None

    def end(self, batch_size: int) -> None:
        """Drop what a round that was broken off has left; the cache of a batch is left empty."""
        if batch_size > 1:  # rows left at different times, and are aligned to a width of their own
            empty(self.cache)
        else:
            if self._snapshot is not None:  # a round was broken off
                self._snapshot.restore()
            # Also when nothing is dropped: sliding-window layers shrink back to their window here.
            crop_attention(self.cache, self._settled or self.cache.get_seq_length())
        end_past_recording(self.cache)

    def _rewind(self, num_kept: int, num_checked: int) -> None:
        """Drop the last positions of all rows."""
        if self._snapshot is not None and num_kept < num_checked:
            self._snapshot.restore()
            crop_attention(self.cache, self._settled)
            assert self._block is not None
            again = self._block[:, :num_kept]
            if num_kept > 1:
                kwargs = self._advanced(copy.copy(self.kwargs), num_kept - 1)
            else:
                kwargs = self.kwargs
            self._forward(again, kwargs, num_kept, logits_to_keep=1, is_first_iteration=False)
        if num_kept < num_checked or any(self.cache.is_sliding):
            crop_attention(self.cache, self._settled + num_kept)

    def _align(self, alignment: Alignment, kwargs: Mapping[str, Any]) -> None:
        kwargs = dict(kwargs)
        for name in PER_POSITION:
            if kwargs.get(name) is not None:
                kwargs[name] = alignment.align_positions(kwargs[name])
        mask = kwargs.get("attention_mask")
        real = alignment.padding_mask(self._device if mask is None else mask.device)
        kwargs["attention_mask"] = real if mask is None else real.to(mask.dtype) * mask
        alignment.align_cache(self.cache)
        self._settled = self.cache.get_seq_length()
        self.kwargs = self._advanced(kwargs, 1)
