"""Attention masks for a batch whose sequences differ in length, made by the target's own mask functions.

Shapes: B sequences, W positions of a block, S columns that attention reads.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import create_masks_for_generate

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.static.fixed_caches import FixedCache, FlatQueries


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
    if isinstance(masks, dict):
        return {kind: _by_sequence(mask, len(lengths)) for kind, mask in masks.items()}
    return _by_sequence(masks, len(lengths))


def _by_sequence(mask: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Reshape a mask `[1, 1, B * W, S]` to `[B, 1, W, S]`."""
    if not torch.compiler.is_compiling():  # compiled code makes no QueryOffsets
        mask = mask.as_subclass(torch.Tensor)
    return mask.view(num_rows, -1, mask.shape[-1])[:, None]
