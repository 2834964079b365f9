"""Where the blocks at many anchors of a known text stand, as training and measurements draft them side by side.

Shapes: B batch, S sequence length, N blocks per row, K block size.
"""

from __future__ import annotations

import torch

UNUSED = -1  # fills the anchors of rows that hold fewer than the longest


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks stand at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions behind the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)
