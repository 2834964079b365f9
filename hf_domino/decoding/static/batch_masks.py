"""Attention masks for a batch whose sequences differ in length, made by the target's own mask functions.

A mask function may return None, which means causal attention over keys that are all valid. In a cache of fixed shape,
the slots behind a sequence are not, so such a mask is written out here. Transformers leaves a mask out for a single
query, for as many queries as keys, and for a cache that is still empty, unless a window or a chunk is shorter than the
cache. Of these, only the last is right here, and only if the forward has more than one query, because attention then
ignores the slots behind the prompt.

Shapes: B sequences, W positions of a block, S columns that attention reads.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.masking_utils import create_masks_for_generate

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.static.fixed_cache import FixedCache


class QueryOffsets(torch.Tensor):
    """One offset per query, never equal to a number: Transformers would leave out the mask if "the" offset were 0."""

    def __eq__(self, other: object) -> Any:
        if isinstance(other, int):
            return False
        return super().__eq__(other)

    __hash__ = torch.Tensor.__hash__


class FlatQueries(Cache):
    """Puts the queries of all sequences in one row, each at its own position, to make the masks of a batch.

    Transformers' mask functions assume that all sequences start at the same position, so they get a single sequence of
    `B * W` queries.

    Args:
        cache ([`FixedCache`]): The target's cache.
        positions (`torch.Tensor`): Positions of the queries, `[B, W]`.
    """

    def __init__(self, cache: FixedCache, positions: torch.Tensor):
        super().__init__(layers=cache.layers)
        flat = positions.flatten()
        offsets = flat - torch.arange(len(flat), device=flat.device)
        if torch.compiler.is_compiling():
            self._offsets = offsets
        else:
            self._offsets = offsets.as_subclass(QueryOffsets)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the position of each query minus its index in the row, `[B * W]`."""
        return self._offsets


def batch_masks(model: Any, cache: FixedCache, lengths: torch.Tensor, width: int) -> Any:
    """Make the target's masks for a block that starts at each sequence's length.

    Args:
        model (`PreTrainedModel`): The target.
        cache ([`FixedCache`]): The target's cache.
        lengths (`torch.Tensor`): Number of positions before the block, `[B, 1]`.
        width (`int`): Positions of the block (W).

    Returns:
        `torch.Tensor` or `dict`: One mask `[B, 1, W, S]`, or one for each kind of layer.
    """
    positions = lengths + torch.arange(width, device=lengths.device)
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)  # some models have their own
    masks = create(
        config=model.config,
        inputs_embeds=torch.empty(1, positions.numel(), 0, dtype=model.dtype, device=lengths.device),
        attention_mask=None,
        **{CACHE: FlatQueries(cache, positions)},
        position_ids=positions.view(1, -1),
    )
    if masks is None and getattr(model.config.get_text_config(decoder=True), "layer_types", None) is not None:
        raise ValueError("Transformers cannot make the masks of its types of layers")  # so the target makes them itself
    if isinstance(masks, dict):
        return {kind: _by_sequence(mask, positions, cache.capacity) for kind, mask in masks.items()}
    return _by_sequence(masks, positions, cache.capacity)


def _by_sequence(mask: torch.Tensor | None, positions: torch.Tensor, capacity: int) -> torch.Tensor:
    """Reshape a mask `[1, 1, B * W, S]` to `[B, 1, W, S]`; write out a mask that Transformers left out."""
    if mask is None:
        slots = torch.arange(capacity, device=positions.device)
        return (slots <= positions[..., None])[:, None]
    if not torch.compiler.is_compiling():  # compiled code makes no QueryOffsets
        mask = mask.as_subclass(torch.Tensor)
    return mask.view(*positions.shape, mask.shape[-1])[:, None]
