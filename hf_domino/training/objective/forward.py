"""The teacher-forced forward that training and its acceptance metric share.

The target runs once over the sequences; the drafter then drafts every block, and its head reads the true tokens.

Shapes: B batch, S sequence length, N blocks per row, K block size, H hidden size, G width of a head's state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.view import block_positions, gather_positions
from hf_domino.target.view import TargetModel


class TargetStates(NamedTuple):
    """What is read of the target over a batch.

    Args:
        captured (`tuple[torch.Tensor, ...]`): Hidden states of the captured layers, each `[B, S, H]`.
        final (`torch.Tensor`, *optional*): The last hidden state `[B, S, H]`, which lm_head reads.
    """

    captured: tuple[torch.Tensor, ...]
    final: torch.Tensor | None = None


@torch.no_grad()
def read_target(
    target: TargetModel, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, final: bool = False
) -> TargetStates:
    """Run the target over right-padded sequences and return what the drafter reads of it.

    Args:
        target (`TargetModel`): The frozen target.
        input_ids (`torch.Tensor`): `[B, S]`; padding only on the right, where a causal target cannot see it.
        position_ids (`torch.Tensor`, *optional*): `[B, S]`, where rows are packed; from such positions Transformers
            makes the mask that keeps them apart. Defaults to the target's own.
        final (`bool`, *optional*, defaults to `False`): Also what lm_head reads.

    Returns:
        `TargetStates`: Hidden states, on the device of `input_ids`.
    """
    capture, device = target.capture_kwargs(final=final), input_ids.device
    if position_ids is not None:
        capture["position_ids"] = position_ids.to(target.input_device)
    last: Any = 1
    if target.input_device.type == "cpu":  # for the view that a slice of the states is, lm_head copies its weights
        last = torch.tensor([input_ids.shape[1] - 1])
    outputs = target.model(input_ids=input_ids.to(target.input_device), use_cache=False, logits_to_keep=last, **capture)
    # Layers of a dispatched target lie on several devices.
    captured = tuple(states.to(device) for states in target.captured(outputs))
    return TargetStates(captured, outputs.hidden_states[-1].to(device) if final else None)


def draft_blocks(
    drafter: DominoDraftModel,
    target: TargetModel,
    input_ids: torch.Tensor,
    context_features: torch.Tensor,
    anchors: torch.Tensor,
    position_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft the blocks at `anchors`, all side by side.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
        target (`TargetModel`): For embeddings.
        input_ids (`torch.Tensor`): `[B, S]`.
        context_features (`torch.Tensor`): `[B, C, H]` of the first C positions, enough to reach all anchors.
        anchors (`torch.Tensor`): `[B, N]`.
        position_ids (`torch.Tensor`, *optional*): `[B, S]`, where rows are packed, as in
            [`~kinds.kind.Kind.draft_blocks`].

    Returns:
        `tuple`: Draft hidden states `[B, N, K, H]`, and the head's state used with each `[B, N, K, G]`; None without a
        correction head.
    """
    hidden = drafter.kind.draft_blocks(target, input_ids, context_features, anchors, position_ids)
    if drafter.head is None:
        return hidden, None
    # With `shift_label` position k uses the state that has read tokens a..a+k, else a..a+k-1.
    first, size = drafter.config.label_offset, drafter.config.block_size
    tokens = gather_positions(input_ids, block_positions(anchors, size)[..., : size - first])  # [B, N, K - first]
    states = drafter.head.read(target, tokens.flatten(0, 1), hidden[..., first:, :].flatten(0, 1))
    states = F.pad(states, (0, 0, first, 0)) if first else states
    return hidden, states.unflatten(0, tokens.shape[:2])
