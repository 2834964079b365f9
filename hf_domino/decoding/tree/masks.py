"""What a target is given for a tree: each position stands at its depth, and sees its own path.

Masks for a chain know padding, windows and chunks, and how many columns each kind of layer returns. In a tree a
position sees of them what the chain's position of its depth sees, as far as that stands on its path.

Shapes: B rows, W positions, S cached columns that a kind of layer returns.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from hf_domino.decoding.tree.form import Tree


def tree_inputs(tree: Tree, inputs: dict[str, Any], target: PreTrainedModel) -> dict[str, Any]:
    """The target's inputs for a chain of the tree's tokens, rearranged for the tree.

    Args:
        tree ([`Tree`]): Proposals behind the anchors.
        inputs (`dict`): What `prepare_inputs_for_generation` gives for the W positions, its mask `[B, ...]`.
        target (`PreTrainedModel`): Of eager or sdpa attention.

    Returns:
        `dict`: Likewise; the mask is `[B, 1, W, S + W]`, or one such for each kind of layer.
    """
    if tree.parents is None:
        return inputs
    create = getattr(target, "create_masks_for_generate", create_masks_for_generate)  # some have their own
    masks = create(
        config=target.config,
        inputs_embeds=torch.empty(*tree.depths.shape, 0, dtype=target.dtype, device=tree.tokens.device),
        attention_mask=inputs.get("attention_mask"),
        past_key_values=inputs["past_key_values"],
        position_ids=inputs["position_ids"],
    )
    masks = {kind: _mask(tree, mask) for kind, mask in masks.items()} if isinstance(masks, dict) else _mask(tree, masks)
    return inputs | {"attention_mask": masks, "position_ids": inputs["position_ids"][..., :1] + tree.depths}


def _mask(tree: Tree, mask: torch.Tensor) -> torch.Tensor:
    """The mask `[B, 1, W, S + W]` of a tree, added or boolean as that of the chain is."""
    num_cached = mask.shape[3] - mask.shape[2]
    depths = tree.depths[:, None]
    rows = mask.gather(2, depths[..., None].expand(-1, -1, -1, mask.shape[3]))
    block = rows[..., num_cached:].gather(3, depths[:, None].expand(-1, -1, mask.shape[2], -1))
    hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return torch.cat((rows[..., :num_cached], block.masked_fill(~tree.sees[:, None], hidden)), dim=3)
