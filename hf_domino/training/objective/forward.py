"""The teacher-forced forward that training and its acceptance metric share.

The target runs once over the sequences; the drafter then drafts every block, and its head reads the true tokens.

Shapes: B batch, S sequence length, C hidden states kept per token, N blocks per row, K block size, H hidden size,
G width of a head's state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hf_domino._common.errors import invalid_argument
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.side_by_side import block_positions, gather_positions
from hf_domino.target.view import Captured, TargetModel

Batch = dict[str, torch.Tensor]  # columns by their names
STATES = "hidden_states"  # of rows that carry the target's, `[S, C, H]`
# Rounding of one product in 16 bits; a state that was not normed, or normed twice, is off by far more.
SAME_LOGITS_TOL = 0.05
PROBED_TOKENS = 8  # the first ones of the vocabulary


@torch.no_grad()
def read_target(target: TargetModel, batch: Batch, final: bool = False) -> tuple[Captured, torch.Tensor | None]:
    """What the drafter reads of a batch: the hidden states that it carries, or those of a forward over it.

    Args:
        target (`TargetModel`): The frozen target.
        batch (`dict[str, torch.Tensor]`): `input_ids` `[B, S]`, with padding only on the right, where a causal
            target cannot see it; or `hidden_states` `[B, S, C, H]` of [`~training.CachedRows`].
        final (`bool`, *optional*, defaults to `False`): Also what lm_head reads.

    Returns:
        `tuple`: Hidden states of the captured layers, each `[B, S, H]`, and the last one `[B, S, H]` or None, on the
        device of `input_ids`.
    """
    if STATES in batch:
        states = batch[STATES].unbind(dim=2)
        num_layers = len(target.layer_ids)
        return states[:num_layers], states[num_layers] if final else None
    input_ids = batch["input_ids"]
    capture = target.capture_kwargs(final=final)
    device = input_ids.device
    last: Any = 1
    if target.input_device.type == "cpu":  # for the view that a slice of the states is, lm_head copies its weights
        last = torch.tensor([input_ids.shape[1] - 1])
    outputs = target.model(input_ids=input_ids.to(target.input_device), use_cache=False, logits_to_keep=last, **capture)
    # Layers of a dispatched target lie on several devices.
    captured = tuple(states.to(device) for states in target.captured(outputs))
    return captured, outputs.hidden_states[-1].to(device) if final else None


@torch.no_grad()
def check_final(target: TargetModel) -> None:
    """Refuse a target whose last hidden state, over a few tokens, is not what its lm_head reads."""
    ids = torch.arange(PROBED_TOKENS, device=target.input_device)[None]
    outputs = target.model(input_ids=ids, use_cache=False, **target.capture_kwargs(final=True))
    expected = outputs.logits.float()
    found = target.logits(outputs.hidden_states[-1].to(outputs.logits.device))
    if not torch.isfinite(expected).all():
        remedy = "Load it in a wider dtype (--target_dtype float32)."
        raise invalid_argument("the target's logits", "finite", "nan or inf", remedy)
    distance = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
    if not distance <= SAME_LOGITS_TOL:
        family = getattr(target.text_config, "model_type", type(target.model).__name__)
        raise invalid_argument(
            f"lm_head of the last hidden state of {family}", "the logits of its forward",
            f"a relative difference of {distance:.2g}",
            "This family's distribution cannot be read from it: set distillation_weight to 0.",
        )  # fmt: skip


def draft_blocks(
    drafter: DominoDraftModel,
    target: TargetModel,
    batch: Batch,
    context_features: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draft the blocks at `anchors`, all side by side.

    Args:
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper of it.
        target (`TargetModel`): For embeddings.
        batch (`dict[str, torch.Tensor]`): `input_ids` `[B, S]` and `anchors` `[B, N]`.
        context_features (`torch.Tensor`, *optional*): `[B, C, H]` of the first C positions, enough to reach all
            anchors; None to draft without any context.

    Returns:
        `tuple`: Draft hidden states `[B, N, K, H]`, and the head's state used with each `[B, N, K, G]`; None without a
        correction head.
    """
    input_ids = batch["input_ids"]
    anchors = batch["anchors"]
    hidden = drafter.draft_blocks(target, input_ids, context_features, anchors)
    if drafter.head is None:
        return hidden, None
    # With `shift_label` position k uses the state that has read tokens a..a+k, else a..a+k-1.
    first = drafter.config.label_offset
    size = drafter.config.block_size
    tokens = gather_positions(input_ids, block_positions(anchors, size)[..., : size - first])  # [B, N, K - first]
    states = drafter.head.read(target, tokens.flatten(0, 1), hidden[..., first:, :].flatten(0, 1))
    if first:
        states = F.pad(states, (0, 0, first, 0))
    return hidden, states.unflatten(0, tokens.shape[:2])
