"""The target's side of a round: the prefill, the verification forward, and the target's cache.

`TargetRunner` is the interface that the loop uses. `GrowingRunner` has a cache that grows, and rewinds it after each
round. With fixed shapes, `StaticRunner` (static/runner.py) takes its place.

Shapes: B unfinished sequences, T prompt tokens, C new prompt positions or accepted positions, P proposals, W = P + 1
positions of a block, H hidden size, V vocabulary.
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
from hf_domino._common.errors import invalid_argument
from hf_domino.decoding.caches import (
    PER_POSITION,
    PLACEHOLDERS,
    Alignment,
    StateSnapshot,
    activate_past_recording,
    attention_class,
    crop_attention,
    drop_forward,
    empty,
    end_past_recording,
    move_forward,
)
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.tree import Tree, tree_inputs
from hf_domino.methods.scorer import along
from hf_domino.targets.attention import unrepeated_keys
from hf_domino.targets.view import Captured, TargetModel


def shortened_cache(expected: int, found: int) -> ValueError:
    """Create the error for a cache that lost positions, or slots, in a forward."""
    remedy = "A hook seems to shorten the cache, so rejected proposals could not be dropped; drop assistant_model, or "
    remedy += "remove the hook."
    return invalid_argument("the length of the target's cache after a forward", expected, found, remedy)


class TargetRunner(ABC):
    """Runs the target through `generate`'s own input preparation.

    Args:
        target ([`TargetModel`]): The target.
        model_kwargs (`dict`): The keyword arguments of its forward, as `generate` prepared them.
        executor ([`Executor`], *optional*): Calls the functions of a round.
        forward_kwargs (`Mapping`, *optional*): Further keyword arguments of every forward, such as
            `output_attentions=True`.
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
        self.outputs: Any = None  # the outputs of the last forward
        self._device = torch.device("cpu")
        # Without this, a sliding-window layer drops positions that it would need in order to rewind.
        activate_past_recording(self.cache)

    @property
    def cache(self) -> Any:
        """The target's cache."""
        return self.kwargs[CACHE]

    def prefill(
        self, input_ids: torch.Tensor, chunk_size: int | None = None, mask_length: int | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Process the last C positions of the prompt `[B, T]`, which are those that the cache does not hold yet."""
        # Returns logits [B, 1, V] of the next token and captured hidden states [B, C, H]. Processing the prompt in
        # chunks limits memory. `mask_length` is the length of an attention mask that `generate` dropped because it was
        # all ones.
        self._device = input_ids.device  # the target's own can be `meta` if parts of it are offloaded
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
            # Count from the right end, because masks and positions do not always cover what was cached before.
            behind = total - end
            kwargs = self.kwargs | {
                name: self.kwargs[name][..., : self.kwargs[name].shape[-1] - behind]
                for name in PER_POSITION
                if self.kwargs.get(name) is not None
            }
            logits, captured = self._forward(chunk, kwargs, chunk.shape[1], 1, is_first_iteration=True)
            self._settle(end)
            pieces.append(captured)
        return logits, tuple(torch.cat(layers, dim=1) for layers in zip(*pieces, strict=True))

    def _settle(self, length: int) -> None:
        """Keep the first `length` positions of the cache, which are committed."""
        crop_attention(self.cache, length)  # even if it drops nothing, it shrinks sliding layers back to their window

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

    @property
    def sliding_windows(self) -> list[int | None]:
        """The sliding window of each of the target's attention layers; None for a layer that sees all positions."""
        layers = [layer for layer in self.cache.layers if not isinstance(layer, PLACEHOLDERS)]
        windows = [layer.sliding_window if getattr(layer, "is_sliding", False) else None for layer in layers]
        kinds = getattr(self.target.text_config, "layer_types", None) or []
        # The last layers of some targets keep no keys. They use those of the last layer of their type that keeps some.
        window_of = dict(zip(kinds, windows, strict=False))
        attending = [
            window for layer, window in zip(layers, windows, strict=True) if attention_class(layer) is not None
        ]
        return attending + [window_of.get(kind) for kind in kinds[len(windows) :]]

    def mask(self, length: int) -> torch.Tensor | None:
        """The last columns `[B, length]` of the two-dimensional attention mask; None if there is no such mask."""
        mask = self.kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            return mask[:, -length:]
        return None

    @property
    def prompt_length(self) -> int:
        """How many positions the cache holds after the prefill, including padding."""
        return int(self.cache.get_seq_length())

    def prompt_mask(self, length: int) -> torch.Tensor | None:
        """The attention mask `[B, length]` of the prompts; None if there is none."""
        return self.mask(length)

    @abstractmethod
    def next_position(self) -> int:
        """The largest position that the next token of any sequence will have."""

    @abstractmethod
    def begin(self, rows: Sequence[int]) -> None:
        """Keep only these sequences, after the prefill and the first new token of each."""

    def reserve(self, prefixes: Prefixes) -> None:  # noqa: B027
        """Make room for the next block after these texts. A cache that grows needs none."""

    @abstractmethod
    def forward_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Run the target on anchors `[B, 1]` and proposals; return logits `[B, W, V]` and captured hidden states."""

    @abstractmethod
    def follow(self, path: torch.Tensor | None, captured: Captured) -> Captured:
        """Move an accepted path of a tree to the front of the block, and return the hidden states along it."""
        # `path` holds the places of its positions in the block, [B, C], beginning with the anchor's. It is None for a
        # chain, whose accepted positions are at the front already.

    @abstractmethod
    def commit(self, counts: Sequence[int], num_checked: int, rows: Sequence[int]) -> None:
        """Keep the committed positions in the cache; drop all others, and all sequences that are not in `rows`."""
        # The last token committed in each sequence has not been through the target yet.

    @abstractmethod
    def end(self, batch_size: int) -> None:
        """Make sure that `generate` can continue from a single sequence's cache, even if a round was interrupted."""

    def _advanced(self, kwargs: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        # For n tokens at once, Transformers repeats the last n token types. To repeat the last one n times, advance by
        # one token at a time.
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
        if is_first_iteration and not self.cache.get_seq_length():  # Phi-3 creates a new cache for long prompts
            self.kwargs[CACHE] = getattr(outputs, CACHE)
            activate_past_recording(self.cache)
        self.outputs = outputs
        logits = outputs.logits[:, -logits_to_keep:].to(input_ids.device)
        return logits, self.target.captured(outputs)


class GrowingRunner(TargetRunner):
    """Runs the target on a cache that grows, and drops rejected tokens from it after each round."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._lengths: list[int] = []  # cached positions of each sequence, not counting left padding
        self._checked: dict[str, Any] = {}  # kwargs of the last verification forward
        self._block: torch.Tensor | None = None  # anchor and proposals of the last verification forward
        # How many positions of the cache are committed, and the recurrent states after them. A prefill or a round that
        # is interrupted leaves the cache as it was there.
        self._settled = int(self.cache.get_seq_length())
        self._snapshot = StateSnapshot(self.cache)

    def prefill(
        self, input_ids: torch.Tensor, chunk_size: int | None = None, mask_length: int | None = None
    ) -> tuple[torch.Tensor, Captured]:
        """Process the prompts, and record how long each of them is."""
        logits, captured = super().prefill(input_ids, chunk_size, mask_length)
        cached = int(self.cache.get_seq_length())
        mask = self.mask(cached)
        if mask is None:
            padding = [0] * len(logits)
        else:
            padding = mask.bool().int().argmax(dim=1).tolist()
        self._lengths = [cached - count for count in padding]
        self._settle(cached)
        return logits, captured

    def _settle(self, length: int) -> None:
        snapshot = StateSnapshot(self.cache)
        # The length is known before the crop, so that `end` can complete a crop that is interrupted.
        self._settled = length
        self._snapshot = snapshot
        super()._settle(length)

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Captured]:
        """Run a forward, after which the cache must hold all of its positions."""
        before = int(self.cache.get_seq_length())
        logits, captured = super()._forward(*args, **kwargs)
        expected = before + captured[0].shape[1]
        if (found := self.cache.get_seq_length()) != expected:
            raise shortened_cache(expected, found)
        return logits, captured

    def next_position(self) -> int:
        """The largest next position, from the position ids of the call or else from the length of the cache."""
        positions = self.kwargs.get("position_ids")
        if positions is None:
            return self.cache.get_seq_length()
        return int(positions.max())

    def begin(self, rows: Sequence[int]) -> None:
        """Realign the batch if some sequences are done after their first token."""
        if not rows or len(rows) == len(self._lengths):
            self.kwargs = self._advanced(self.kwargs, 1)
        else:
            self._lengths = [self._lengths[row] for row in rows]
            self._align(Alignment(rows, [0] * len(rows), self._lengths), self.kwargs)

    def forward_block(self, anchors: torch.Tensor, proposed: Tree) -> tuple[torch.Tensor, Captured]:
        """Run the verification forward on the growing cache."""
        width = proposed.num_nodes + 1
        if width > 1:
            self._checked = self._advanced(copy.copy(self.kwargs), width - 1)
        else:
            self._checked = self.kwargs
        self._block = torch.cat((anchors, proposed.tokens), dim=1)
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
        """Rewind all sequences together if they keep equally many tokens; otherwise realign them."""
        lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        rows = rows or ([0] if len(counts) == 1 else [])  # the cache of a single sequence can serve a later call
        if len(rows) == len(counts) and min(counts) == max(counts):
            self._rewind(counts[0], num_checked)
            self.kwargs = self._advanced(self.kwargs, counts[0])
        elif rows:
            dropped = [num_checked - counts[row] for row in rows]
            self._align(Alignment(rows, dropped, [lengths[row] for row in rows]), self._checked)
        self._lengths = [lengths[row] for row in rows]

    def end(self, batch_size: int) -> None:
        """Drop what an interruption has left in the cache of a single sequence; empty the cache of a batch."""
        if batch_size > 1:  # sequences left at different times, so the cache no longer holds all of them
            empty(self.cache)
        else:
            self._snapshot.restore()
            drop_forward(self.cache, self._settled)
        end_past_recording(self.cache)

    def _rewind(self, num_kept: int, num_checked: int) -> None:
        """Drop the same number of last positions in all sequences."""
        if self._snapshot and num_kept < num_checked:
            self._snapshot.restore()
            crop_attention(self.cache, self._settled)
            assert self._block is not None
            again = self._block[:, :num_kept]
            if num_kept > 1:
                kwargs = self._advanced(copy.copy(self.kwargs), num_kept - 1)
            else:
                kwargs = self.kwargs
            self._forward(again, kwargs, num_kept, logits_to_keep=1, is_first_iteration=False)
        self._settle(self._settled + num_kept)

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
