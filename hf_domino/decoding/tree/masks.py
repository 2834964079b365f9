"""Inputs of a target for a tree: each position stands at its depth, and sees its own path.

Masks for a chain know padding, windows and chunks, and how many columns each kind of layer returns. In a tree a
position sees of them what the chain's position of its depth sees, as far as that stands on its path.

Shapes: B rows, W positions, S columns that a kind of layer returns, those of the block among them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from hf_domino._common.cache_name import CACHE


def tree_inputs(
    depths: torch.Tensor,
    sees: torch.Tensor,
    inputs: dict[str, Any],
    target: PreTrainedModel,
    start: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The target's inputs for a chain of a tree's tokens, rearranged for the tree.

    Args:
        depths (`torch.Tensor`): Those of [`Tree`], `[B, W]`.
        sees (`torch.Tensor`): Likewise, `[B, W, W]`.
        inputs (`dict`): What `prepare_inputs_for_generation` gives for the W positions, its mask `[B, ...]`.
        target (`PreTrainedModel`): Of eager or sdpa attention.
        start (`torch.Tensor`, *optional*): The column that the block begins at, `[]`; defaults to the last W ones.

    Returns:
        `dict`: Likewise; the mask is `[B, 1, W, S]`, or one such for each kind of layer.
    """
    masks = inputs.get("attention_mask")
    if not isinstance(masks, dict) and (masks is None or masks.dim() == 2):  # fixed caches have their masks already
        create = getattr(target, "create_masks_for_generate", create_masks_for_generate)  # some have their own
        masks = create(
            config=target.config,
            inputs_embeds=torch.empty(*depths.shape, 0, dtype=target.dtype, device=depths.device),
            attention_mask=masks,
            **{CACHE: inputs[CACHE]},
            position_ids=inputs["position_ids"],
        )
    if isinstance(masks, dict):
        masks = {kind: _mask(depths, sees, mask, start) for kind, mask in masks.items()}
    else:
        masks = _mask(depths, sees, masks, start)
    return inputs | {"attention_mask": masks, "position_ids": inputs["position_ids"][..., :1] + depths}


def _mask(
    depths: torch.Tensor, sees: torch.Tensor, mask: torch.Tensor, start: torch.Tensor | None = None
) -> torch.Tensor:
    """The mask `[B, 1, W, S]` of a tree, added or boolean as that of the chain is."""
    width, size = mask.shape[2:]
    rows = mask.gather(2, depths[:, None, :, None].expand(-1, -1, -1, size))
    first = size - width if start is None else start
    block = rows.gather(3, (first + depths)[:, None, None].expand(-1, -1, width, -1))
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    columns = first + torch.arange(width, device=mask.device)
    return rows.index_copy(3, columns, block.masked_fill(~sees[:, None], hidden))
