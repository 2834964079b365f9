"""Blocks at many anchors of known text, drafted side by side, as training and measurements do.

The block of anchor a stands at positions a..a+K-1 and sees the context strictly before a and itself (arXiv 2605.29707,
2602.06036).

Shapes: B batch, S sequence length, C context positions, N blocks per row, K block size, H hidden size.
"""

from __future__ import annotations

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target import TargetModel

UNUSED = -1  # fills the anchors of rows that hold fewer than the longest


def draft_hidden_states(
    drafter: DominoDraftModel,
    target: TargetModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    context_features: torch.Tensor | None,
    anchors: torch.Tensor,
) -> torch.Tensor:
    """Run the backbone over the blocks at `anchors`, all side by side.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
        target (`TargetModel`): For embeddings.
        input_ids (`torch.Tensor`): `[B, S]`.
        attention_mask (`torch.Tensor`): `[B, S]`, nonzero where the sequence holds a token.
        context_features (`torch.Tensor`, *optional*): `[B, C, H]` of the first C positions, enough to reach all
            anchors; None to draft without any context.
        anchors (`torch.Tensor`): `[B, N]`, -1 where a row has fewer.

    Returns:
        `torch.Tensor`: Draft hidden states `[B, N, K, H]`.
    """
    config, num_context = drafter.config, 0 if context_features is None else context_features.shape[1]
    positions = block_positions(anchors, config.block_size)  # [B, N, K]
    noise_ids = torch.full_like(positions, config.mask_token_id)
    noise_ids[..., 0] = gather_positions(input_ids, positions[..., :1])[..., 0]
    mask = block_attention_mask(attention_mask[:, :num_context], anchors, config.block_size)
    context_positions = torch.arange(num_context, device=anchors.device).expand(len(input_ids), -1)
    hidden = drafter.forward(
        noise_embeds=target.embed(noise_ids.flatten(1)).to(drafter.device),
        position_ids=positions.flatten(1).to(drafter.device),
        context_features=context_features,
        context_position_ids=context_positions.to(drafter.device),
        attention_mask=mask.to(drafter.device),
    )
    return hidden.unflatten(1, positions.shape[1:])


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks stand at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions behind the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)


def block_attention_mask(attention_mask: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """What the blocks may see: context strictly before their anchor, and themselves.

    Args:
        attention_mask (`torch.Tensor`): `[B, S]`, nonzero where the sequence holds a token.
        anchors (`torch.Tensor`): `[B, N]`, -1 where a row has fewer.
        block_size (`int`): Positions of a block (K).

    Returns:
        `torch.Tensor`: `[B, 1, N*K, S + N*K]` bool, True where a query may look.
    """
    (batch_size, length), num_blocks = attention_mask.shape, anchors.shape[1]
    before = torch.arange(length, device=anchors.device) < anchors[..., None]  # [B, N, S]
    context = (before & attention_mask.bool()[:, None]).repeat_interleave(block_size, dim=1)  # [B, N*K, S]
    block = torch.arange(num_blocks, device=anchors.device).repeat_interleave(block_size)  # [N*K]
    itself = (block[:, None] == block).expand(batch_size, -1, -1)  # [B, N*K, N*K]
    return torch.cat((context, itself), dim=-1)[:, None]
