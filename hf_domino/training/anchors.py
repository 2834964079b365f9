"""Anchors and blocks of a training batch: which blocks are trained, on which labels, and what each may see.

Many anchors of a sequence are trained side by side. The block of anchor a stands at positions a..a+K-1, sees the
context strictly before a and itself, and is scored on the tokens that it would propose (arXiv 2605.29707, 2602.06036).

Shapes: B batch, S sequence length, N blocks per row, K block size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_domino.configuration import DominoConfig

UNUSED = -1  # fills the anchors of rows that hold fewer candidates than the longest


def seeded_generator(*parts: int) -> torch.Generator:
    """A CPU generator whose seed is a hash of `parts`, so that equal parts draw equal numbers in any process."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def anchor_candidates(loss_mask: torch.Tensor) -> torch.Tensor:
    """Mark the positions whose own token and successor are both supervised.

    Args:
        loss_mask (`torch.Tensor`): `[B, S]`, nonzero where the token is supervised.

    Returns:
        `torch.Tensor`: `[B, S]` bool.
    """
    supervised = loss_mask.bool()
    candidates = torch.zeros_like(supervised)
    candidates[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    return candidates


def sample_anchors(loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator) -> torch.Tensor:
    """Draw up to `num_anchors` anchors per row, without replacement.

    What a row draws depends on its own candidates and the rows before it, not on padding: the same rows split into
    smaller batches and drawn in order get the same anchors.

    Args:
        loss_mask (`torch.Tensor`): `[B, S]`, nonzero where the token is supervised.
        num_anchors (`int`): Most anchors of a row.
        generator (`torch.Generator`): CPU generator to draw from.

    Returns:
        `torch.Tensor`: `[B, N]` int64, increasing, filled up with `UNUSED`; N is at least 1.
    """
    rows = []
    for row in anchor_candidates(loss_mask.cpu()):
        positions = row.nonzero().flatten()
        chosen = torch.randperm(len(positions), generator=generator)[:num_anchors]
        rows.append(positions[chosen].sort().values)
    anchors = pad_sequence(rows, batch_first=True, padding_value=UNUSED)
    return anchors if anchors.shape[1] else anchors.new_full((len(rows), 1), UNUSED)


def sample_anchors_by_content(batch: Mapping[str, torch.Tensor], num_anchors: int, *seeds: int) -> torch.Tensor:
    """Draw anchors that depend on nothing but a row's own tokens: not on its batch, its place or its process.

    Args:
        batch (`Mapping[str, torch.Tensor]`): `input_ids`, `loss_mask` and `attention_mask`, `[B, S]`.
        num_anchors (`int`): Most anchors of a row.
        seeds (`int`): Seeds beside the tokens.

    Returns:
        `torch.Tensor`: `[B, N]` int64 as from [`sample_anchors`], on the batch's device.
    """
    rows = []
    for ids, loss_mask, seen in zip(batch["input_ids"], batch["loss_mask"], batch["attention_mask"], strict=True):
        generator = seeded_generator(*seeds, *ids[seen.bool()].tolist())
        rows.append(sample_anchors(loss_mask[None], num_anchors, generator)[0])
    return pad_sequence(rows, batch_first=True, padding_value=UNUSED).to(batch["input_ids"].device)


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks stand at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions behind the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)


def block_labels(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, config: DominoConfig, loss_decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token each block position should predict, and how much it counts.

    Position k predicts the token at a+k+1 with `shift_label`, else a+k. Its weight is valid * loss_mask(label) *
    exp(-max(k - o, 0) / loss_decay) with o = `config.label_offset`; valid means that the block is used, its label is
    inside the sequence and k >= o (without `shift_label`, position 0 would learn to copy the anchor).

    Args:
        input_ids (`torch.Tensor`): `[B, S]`.
        loss_mask (`torch.Tensor`): `[B, S]`, nonzero where the token is supervised.
        anchors (`torch.Tensor`): `[B, N]` from [`sample_anchors`].
        config (`DominoConfig`): For `block_size` and `label_offset`.
        loss_decay (`float`): Positions after which a weight has fallen to 1/e.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Labels `[B, N, K]` int64 and weights `[B, N, K]` fp32.
    """
    offset = config.label_offset
    positions = block_positions(anchors, config.block_size) + 1 - offset
    steps = torch.arange(config.block_size, device=anchors.device)  # [K]
    valid = (anchors != UNUSED)[..., None] & (positions < input_ids.shape[1]) & (steps >= offset)
    valid = valid & gather_positions(loss_mask, positions).bool()
    decay = torch.exp(-(steps - offset).clamp(min=0) / loss_decay)
    return gather_positions(input_ids, positions), valid * decay


def block_attention_mask(attention_mask: torch.Tensor, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """What the blocks may see: context strictly before their anchor, and themselves.

    Args:
        attention_mask (`torch.Tensor`): `[B, S]`, nonzero where the sequence holds a token.
        anchors (`torch.Tensor`): `[B, N]` from [`sample_anchors`].
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
