"""Blocks at many anchors of known text, drafted side by side, as training and measurements do.

The block of anchor a stands at positions a..a+K-1 and sees the context strictly before a and itself (arXiv 2605.29707,
2602.06036).

Shapes: B batch, S sequence length, C context positions, N blocks per row, K block size, H hidden size.
"""

from __future__ import annotations

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.view import BlockView
from hf_domino.target.view import TargetModel

UNUSED = -1  # fills the anchors of rows that hold fewer than the longest


def draft_hidden_states(
    drafter: DominoDraftModel,
    target: TargetModel,
    input_ids: torch.Tensor,
    context_features: torch.Tensor | None,
    anchors: torch.Tensor,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the backbone over the blocks at `anchors`, all side by side.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
        target (`TargetModel`): For embeddings.
        input_ids (`torch.Tensor`): `[B, S]`.
        context_features (`torch.Tensor`, *optional*): `[B, C, H]` of the first C positions, enough to reach all
            anchors; None to draft without any context.
        anchors (`torch.Tensor`): `[B, N]`, -1 where a row has fewer; increasing ones are the fastest.
        position_ids (`torch.Tensor`, *optional*): `[B, S]`, from 0 on in each of the rows that were packed into one; a
            block sees its own only. Defaults to one row.

    Returns:
        `torch.Tensor`: Draft hidden states `[B, N, K, H]`.
    """
    config, num_context = drafter.config, 0 if context_features is None else context_features.shape[1]
    positions = block_positions(anchors, config.block_size)  # [B, N, K]
    noise_ids = torch.full_like(positions, config.mask_token_id)
    noise_ids[..., 0] = gather_positions(input_ids, positions[..., :1])[..., 0]
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1], device=anchors.device).expand_as(input_ids)
    places = position_ids.gather(1, anchors.clamp(min=0))  # of the anchors in their own rows, [B, N]
    view = BlockView.at(anchors, config.block_size, num_context, anchors.clamp(min=0) - places)
    hidden = drafter.run_backbone(
        noise_embeds=target.embed(noise_ids.flatten(1)).to(drafter.device),
        position_ids=block_positions(places, config.block_size).flatten(1).to(drafter.device),
        context_features=context_features,
        context_position_ids=position_ids[:, :num_context].to(drafter.device),
        view=view.to(drafter.device),
    )
    return hidden.unflatten(1, positions.shape[1:])


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks stand at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions behind the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)
