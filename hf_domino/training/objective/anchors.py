"""Collate examples into batches, draw their anchors, and make the labels of the blocks that are trained.

Many anchors of a sequence are trained side by side. Each is scored on the tokens that its block should propose (arXiv
2605.29707, 2602.06036).

Shapes: B batch, S sequence length, C hidden states kept per token, H hidden size, N blocks per sequence, K block size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods.side_by_side import UNUSED, block_positions, gather_positions
from hf_domino.training.objective.forward import STATES, Batch

TRAINING_STREAM, EVALUATION_STREAM = range(2)  # seeds that make training and evaluation draw different anchors


def sample_anchors(batch: Batch, num_anchors: int, *seeds: int) -> torch.Tensor:
    """Draw up to `num_anchors` anchors per sequence, without replacement.

    The anchors of a sequence depend only on `seeds` and the sequence, which is its tokens and its loss mask. So several
    processes, smaller batches or a resumed run draw the same anchors as one large batch, and equal sequences get the
    same anchors.

    Args:
        batch (`dict[str, torch.Tensor]`): `input_ids`, `loss_mask` and `attention_mask` `[B, S]`.
        num_anchors (`int`): Maximum number of anchors of a sequence.
        seeds (`int`): Seeds that are combined with the tokens of the sequence.

    Returns:
        `torch.Tensor`: `[B, N]` int64 on the batch's device, increasing, padded with `UNUSED`; N is at least 1.
    """
    rows = []
    # A token can be an anchor if it and its successor are both supervised.
    candidates = F.pad(batch["loss_mask"].bool(), (0, 1))
    candidates = candidates[:, :-1] & candidates[:, 1:]
    for row, ids, seen in zip(candidates.cpu(), batch["input_ids"].cpu(), batch["attention_mask"].cpu(), strict=True):
        digest = hashlib.sha256(repr((*seeds, *ids[seen.bool()].tolist())).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        positions = row.nonzero().flatten()
        chosen = torch.randperm(len(positions), generator=generator)[:num_anchors]
        rows.append(positions[chosen].sort().values)
    anchors = pad_sequence(rows, batch_first=True, padding_value=UNUSED)
    if not anchors.shape[1]:
        anchors = anchors.new_full((len(rows), 1), UNUSED)
    return anchors.to(batch["input_ids"].device)


def collate_rows(rows: Sequence[dict[str, Any]], pad_token_id: int = 0, multiple: int = 1) -> Batch:
    """Collate examples into a batch, padded on the right to a length S that is divisible by `multiple`.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `loss_mask` and `attention_mask`, `[B, S]` int64, and `hidden_states`
        `[B, S, C, H]` if the examples have them.

    Raises:
        ValueError: If the examples are not tokenized, as with records of text from a data set without a length.
    """
    if "loss_mask" not in rows[0]:
        fields = ", ".join(f"`{field}`" for field in rows[0])
        raise ValueError(f"rows must have `input_ids` and `loss_mask`, got {fields}: load them with load_rows.")
    names = ("input_ids", "loss_mask")
    columns = {name: [torch.as_tensor(row[name], dtype=torch.int64) for row in rows] for name in names}
    columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
    if STATES in rows[0]:
        columns[STATES] = [row[STATES] for row in rows]
    batch = {}
    for name, values in columns.items():
        value = pad_token_id if name == "input_ids" else 0
        padded = pad_sequence(values, batch_first=True, padding_value=value)
        spare = -padded.shape[1] % multiple
        if spare:
            padded = F.pad(padded, (0, 0) * (padded.dim() - 2) + (0, spare), value=value)
        batch[name] = padded
    return batch


def collate_and_draw(collate: Callable[[Any], Batch], args: Any, epoch: torch.Tensor, rows: Any) -> Batch:
    """Collate training examples, and draw their `anchors` `[B, N]` on the CPU, so that nothing waits for the device."""
    batch = collate(rows)
    anchors = sample_anchors(batch, args.num_anchors, args.seed, TRAINING_STREAM, int(epoch))
    if args.is_static:  # the same shape whatever the text is, so that devices can replay recorded work
        anchors = F.pad(anchors, (0, args.num_anchors - anchors.shape[1]), value=UNUSED)
    return batch | {"anchors": anchors}


def block_labels(batch: Batch, config: DominoConfig, loss_decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token that each block position should predict, and its weight in the loss.

    Position k predicts the token at a+k+1 with `shift_label`, else a+k. Its weight is valid * loss_mask(label) *
    exp(-max(k - o, 0) / loss_decay) with o = `config.label_offset`; valid means that the block is used, the label is
    inside the sequence and k >= o (without `shift_label`, position 0 would only learn to copy the anchor).

    Args:
        batch (`dict[str, torch.Tensor]`): `input_ids` `[B, S]`; `loss_mask` `[B, S]`, nonzero where the token is
            supervised; `anchors` `[B, N]`.
        config (`DominoConfig`): The drafter's configuration, of which `block_size` and `label_offset` are read.
        loss_decay (`float`): Number of positions after which a weight has fallen to 1/e.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Labels `[B, N, K]` int64 and weights `[B, N, K]` fp32.
    """
    input_ids = batch["input_ids"]
    anchors = batch["anchors"]
    offset = config.label_offset
    positions = block_positions(anchors, config.block_size) + 1 - offset
    steps = torch.arange(config.block_size, device=anchors.device)  # [K]
    valid = (anchors != UNUSED)[..., None] & (positions < input_ids.shape[1]) & (steps >= offset)
    valid = valid & gather_positions(batch["loss_mask"], positions).bool()
    decay = torch.exp(-(steps - offset).clamp(min=0) / loss_decay)
    return gather_positions(input_ids, positions), valid * decay
