"""The teacher-forced forward that training and its acceptance metric share.

The target runs once over the sequences. The drafter then drafts every block, and its head reads the true tokens.

Shapes: B batch, S sequence length, C hidden states kept per token, N blocks per sequence, K block size, H hidden size,
G width of a head's state, D tokens that can be drafted.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.side_by_side import block_positions, gather_positions
from hf_domino.targets.view import Captured, TargetModel
from hf_domino.training.losses.chunked import LazyLogits

Batch = dict[str, torch.Tensor]  # columns by their names
STATES = "hidden_states"  # column of examples that carry the target's hidden states, `[S, C, H]`
# Allows for the rounding of one product in 16 bits. A state that was not normed, or normed twice, is off by far more.
SAME_LOGITS_TOL = 0.05
PROBED_TOKENS = 8  # the first ones of the vocabulary


@torch.no_grad()
def read_target(target: TargetModel, batch: Batch, final: bool = False) -> tuple[Captured, torch.Tensor | None]:
    """Return the hidden states that the drafter reads: the batch's own if it has them, otherwise from a target forward.

    Args:
        target (`TargetModel`): The frozen target.
        batch (`dict[str, torch.Tensor]`): `input_ids` `[B, S]`, with padding only on the right, where a causal
            target cannot see it; or `hidden_states` `[B, S, C, H]` of [`~training.CachedRows`].
        final (`bool`, *optional*, defaults to `False`): Whether to return the state that lm_head reads, too.

    Returns:
        `tuple`: Hidden states of the captured layers, each `[B, S, H]`, and the final one `[B, S, H]` or None, on the
        device of `input_ids`.
    """
    if STATES in batch:
        states = batch[STATES].unbind(dim=2)
        num_layers = len(target.layer_ids)
        if len(states) < num_layers + final:
            expected = f"{num_layers + final} for each token, the last of them that lm_head reads"
            remedy = "Write them again with final=True, or train with distillation_weight=0."
            raise invalid_argument("the hidden states of the examples", expected, len(states), remedy)
        return states[:num_layers], states[num_layers] if final else None
    input_ids = batch["input_ids"]
    capture = target.capture_kwargs(final=final)
    device = input_ids.device
    last: Any = 1
    if target.input_device.type == "cpu":  # for a slice of the states, which is a view, lm_head would copy its weights
        last = torch.tensor([input_ids.shape[1] - 1])
    outputs = target.model(input_ids=input_ids.to(target.input_device), use_cache=False, logits_to_keep=last, **capture)
    # The layers of a dispatched target are on several devices.
    captured = tuple(states.to(device) for states in target.captured(outputs))
    return captured, outputs.hidden_states[-1].to(device) if final else None


@torch.no_grad()
def check_final(target: TargetModel) -> None:
    """Run a few tokens, and raise a `ValueError` if the last hidden state is not what the target's lm_head reads."""
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
        drafter (`DominoDraftModel`): The drafter itself, not a wrapper around it.
        target (`TargetModel`): The target, for its embeddings.
        batch (`dict[str, torch.Tensor]`): `input_ids` `[B, S]` and `anchors` `[B, N]`.
        context_features (`torch.Tensor`, *optional*): Features of the first positions, `[B, positions, H]`, enough to
            reach all anchors; None to draft without context.

    Returns:
        `tuple`: Draft hidden states `[B, N, K, H]`, and the head's state at each position `[B, N, K, G]`, or None
        without a correction head.
    """
    input_ids = batch["input_ids"]
    anchors = batch["anchors"]
    hidden = drafter.draft_blocks(target, input_ids, context_features, anchors)
    if drafter.head is None:
        return hidden, None
    # With `shift_label`, position k uses the state that has read the tokens a..a+k, otherwise a..a+k-1.
    first = drafter.config.label_offset
    size = drafter.config.block_size
    tokens = gather_positions(input_ids, block_positions(anchors, size)[..., : size - first])  # [B, N, K - first]
    states = drafter.head.read(target, tokens.flatten(0, 1), hidden[..., first:, :].flatten(0, 1))
    if first:
        states = F.pad(states, (0, 0, first, 0))
    return hidden, states.unflatten(0, tokens.shape[:2])


def corrected_positions(config: DominoConfig, device: torch.device) -> torch.Tensor:
    """Return which positions of a block the head corrects, `[K]` bool; the others keep their base logits."""
    return torch.arange(config.block_size, device=device) >= config.label_offset + config.pure_draft_prefix_len


def correct(
    drafter: DominoDraftModel,
    target: TargetModel,
    base: torch.Tensor,
    hidden: torch.Tensor,
    states: torch.Tensor,
    is_corrected: torch.Tensor,
) -> torch.Tensor:
    """Correct the base logits of some positions.

    Args:
        drafter (`DominoDraftModel`): A drafter with a correction head.
        target (`TargetModel`): The target, for its embeddings and lm_head.
        base (`torch.Tensor`): Base logits `[..., D]`.
        hidden (`torch.Tensor`): Draft hidden states `[..., H]`.
        states (`torch.Tensor`): The head's states `[..., G]`.
        is_corrected (`torch.Tensor`): `[...]` bool, from [`corrected_positions`].
    """
    head = drafter.head
    assert head is not None
    activated = head.activate(head.project_hidden(hidden), states) * is_corrected[..., None]
    return head.correct(target, base, activated)


def draft_logits(
    drafter: DominoDraftModel,
    target: TargetModel,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    is_corrected: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the base and the corrected logits of some positions.

    Args:
        drafter, target, hidden, is_corrected: As for [`correct`].
        states (`torch.Tensor`, *optional*): The head's states `[..., G]`; None without a correction head.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Both `[..., D]` in fp32; the same tensor twice without a correction head.
    """
    base = drafter.logits(target, hidden)
    if states is None:
        return base, base
    return base, correct(drafter, target, base, hidden, states, is_corrected)


def lazy_logits(
    drafter: DominoDraftModel,
    target: TargetModel,
    hidden: torch.Tensor,
    states: torch.Tensor | None,
    final: torch.Tensor | None = None,
) -> tuple[LazyLogits, LazyLogits, LazyLogits | None]:
    """Return the logits of drafted blocks, which are computed later: base, corrected, and the target's.

    Args:
        drafter (`DominoDraftModel`): The drafter.
        target (`TargetModel`): The target.
        hidden, states (`torch.Tensor`): What [`draft_blocks`] returned, with the blocks of all sequences in one
            dimension: `[N, K, H]`, and `[N, K, G]` or None.
        final (`torch.Tensor`, *optional*): The target's final hidden states `[N, K, H]` one position before the labels.

    Returns:
        `tuple`: [`LazyLogits`] `[N, K, D]`: base logits, corrected ones (the same without a correction head), and
        those of the target or None.
    """
    parameters = drafter.head_parameters()
    base = corrected = LazyLogits(partial(drafter.logits, target), (hidden,), parameters)
    if states is not None:
        is_corrected = corrected_positions(drafter.config, hidden.device).expand(hidden.shape[:2])
        corrected = LazyLogits(partial(correct, drafter, target), (base, hidden, states, is_corrected), parameters)
    if final is None:
        return base, corrected, None
    return base, corrected, LazyLogits(partial(drafter.vocabulary.logits, target), (final,))
