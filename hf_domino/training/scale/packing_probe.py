"""Whether a target keeps packed rows apart; tried on one of them before training.

Transformers makes the mask from positions that begin again, for attention that takes masks. Layers that carry a state
(recurrent, linear, convolutions) read on over the border, and some attention kernels know packed rows in batches of one
only.

Shapes: B batch, S sequence length, L captured layers, H hidden size.
"""

from __future__ import annotations

import torch

from hf_domino._common.refusal import refusal
from hf_domino.data.packing import PackedRows, collate_rows
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.forward import read_target

MOST_CHANGE = 0.1  # as a share of a state's norm: several roundings in 16 bits, and far less than another text changes
REMEDY = (
    "Its layers read over the borders of rows. Leave packing out; of a target with flash attention, load it with "
    "attn_implementation='sdpa'."
)


@torch.no_grad()
def check_no_leaks(target: TargetModel, rows: PackedRows) -> None:
    """Refuse a target for which the first token of a row is another one where a row lies before it.

    Args:
        target (`TargetModel`): The target, where it will be in training.
        rows (`PackedRows`): The training rows; the first one that holds several is tried, in a batch of two.
    """
    packed = next((rows[index] for index, several in enumerate(rows.bins) if len(several) > 1), None)
    if packed is None:
        return
    batch = {name: values.to(target.input_device) for name, values in collate_rows([packed] * 2).items()}
    start = packed["position_ids"].index(0, 1)
    together = _states(target, batch)[:, start]  # [B, L * H]
    alone = _states(target, {"input_ids": batch["input_ids"][:, start : start + 1]})[:, 0]
    change = ((together - alone).norm(dim=-1) / alone.norm(dim=-1)).max().item()
    if not change <= MOST_CHANGE:
        name = f"packing for {type(target.model).__name__}"
        raise refusal(name, f"without a change of hidden states above {MOST_CHANGE}", f"{change:.2g}", REMEDY)


def _states(target: TargetModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states of all captured layers side by side, `[B, S, L * H]` in fp32."""
    return torch.cat(read_target(target, batch).captured, dim=-1).float()
