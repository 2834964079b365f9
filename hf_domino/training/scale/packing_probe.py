"""Whether a target keeps packed rows apart; tried on some of them before training.

Transformers makes the mask from positions that begin again, for attention that takes masks. Layers that carry a state
(recurrent, linear, convolutions) read on over the border, and some attention kernels know packed rows in batches of one
only.

Shapes: B batch, S sequence length, L captured layers, H hidden size.
"""

from __future__ import annotations

import torch

from hf_domino._common.refusal import refusal
from hf_domino.data.packing import PackedRows, collate_rows, parts
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.forward import read_target

PROBED_ROWS = 2  # more than one, as in training
MIN_CHANGE = 1e-3  # as a share of a state's norm: hundreds of roundings in fp32
TIMES_NOISE = 4  # of what another length of the batch changes, which is rounding alone; experts may be chosen anew
REMEDY = (
    "Its layers read over the borders of rows. Leave packing out; of a target with flash attention, load it with "
    "attn_implementation='sdpa'."
)


@torch.no_grad()
def check_no_leaks(target: TargetModel, rows: PackedRows) -> None:
    """Compare hidden states of packed rows with those of the same rows alone.

    Args:
        target (`TargetModel`): The target, where it will be in training.
        rows (`PackedRows`): The training rows; those that hold several are tried.

    Raises:
        ValueError: If they differ by more than rounding does.
    """
    several = [index for index, packed in enumerate(rows.bins) if len(packed) > 1][:PROBED_ROWS]
    if not several:
        return
    probed = [rows[index] for index in several] * (PROBED_ROWS // len(several))
    batch = {name: values.to(target.input_device) for name, values in collate_rows(probed).items()}
    together = _states(target, batch)
    change, noise = 0.0, 0.0
    for packed, states in zip(probed, together, strict=True):
        start = 0
        for ids in parts(packed):
            padded = torch.zeros_like(batch["input_ids"])
            padded[:, : len(ids)] = torch.tensor(ids)
            alone = _states(target, {"input_ids": padded[:1, : len(ids)]})[0]
            change = max(change, _largest_change(states[start : start + len(ids)], alone))
            noise = max(noise, _largest_change(_states(target, {"input_ids": padded})[0, : len(ids)], alone))
            start += len(ids)
    if not change <= (allowed := max(MIN_CHANGE, TIMES_NOISE * noise)):
        name = f"packing for {type(target.model).__name__}"
        raise refusal(name, f"without a change of hidden states above {allowed:.2g}", f"{change:.2g}", REMEDY)


def _states(target: TargetModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hidden states of all captured layers side by side, `[B, S, L * H]` in fp32."""
    return torch.cat(read_target(target, batch).captured, dim=-1).float()


def _largest_change(states: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference at a position of `[S, L * H]`, as a share of the state's norm."""
    difference = (states - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
    return float(difference.max())
