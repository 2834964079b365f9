"""Blocks at many anchors of a known text, side by side: each sees the context before its anchor, and itself.

`BlockView` is the only description of it, from which the dense mask and `side_by_side.py` compute the same attention.

Shapes: B batch, S sequence length, N blocks per row, K block size, C context positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNUSED = -1  # fills the anchors of rows that hold fewer than the longest


@dataclass(frozen=True, eq=False)
class BlockView:
    """What the positions of blocks side by side see. Keys are ordered: context, then the blocks.

    Args:
        firsts (`torch.Tensor`): First context position that each block position sees, `[B, N, K]` int64.
        ends (`torch.Tensor`): Where the context that a block sees ends, its anchor, `[B, N]` int64.
        inside (`torch.Tensor`): Which positions of its own block (columns) each block position sees, `[K, K]` bool.
        num_context (`int`): Context positions there are (C).
    """

    firsts: torch.Tensor
    ends: torch.Tensor
    inside: torch.Tensor
    num_context: int

    @classmethod
    def at(cls, anchors: torch.Tensor, block_size: int, num_context: int) -> BlockView:
        """The view of blocks that see all of themselves and the context strictly before their anchors.

        Args:
            anchors (`torch.Tensor`): `[B, N]` int64; a block at -1, which is unused, sees only itself.
            block_size (`int`): Positions of a block (K).
            num_context (`int`): Context positions there are (C).
        """
        firsts = torch.zeros_like(anchors)[..., None].expand(-1, -1, block_size)
        inside = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
        ends = anchors.clamp(0, num_context)
        return cls(firsts, ends, inside, num_context)

    @property
    def block_size(self) -> int:
        """Positions of a block (K)."""
        return len(self.inside)

    @property
    def num_queries(self) -> int:
        """Block positions of a row, N * K."""
        return self.ends.shape[1] * self.block_size

    @property
    def num_keys(self) -> int:
        """Context and block positions of a row, C + N * K."""
        return self.num_context + self.num_queries

    @property
    def mask(self) -> torch.Tensor:
        """The view written out, `[B, 1, N * K, C + N * K]` bool, True where a query may look."""
        positions = torch.arange(self.num_context, device=self.ends.device)
        context = (positions >= self.firsts[..., None]) & (positions < self.ends[..., None, None])  # [B, N, K, C]
        same_block = torch.eye(self.ends.shape[1], dtype=torch.bool, device=self.ends.device)
        blocks = torch.kron(same_block, self.inside).expand(len(self.ends), -1, -1)  # [B, N * K, N * K]
        return torch.cat((context.flatten(1, 2), blocks), dim=-1)[:, None]

    def to(self, device: torch.device) -> BlockView:
        """The same view on a device."""
        return BlockView(self.firsts.to(device), self.ends.to(device), self.inside.to(device), self.num_context)


def block_positions(anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Absolute positions `[B, N, K]` of the blocks at `anchors` `[B, N]`; unused blocks stand at 0."""
    return anchors.clamp(min=0)[..., None] + torch.arange(block_size, device=anchors.device)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Take `values` `[B, S]` at `positions` `[B, N, K]`; positions behind the end give the last value."""
    inside = positions.clamp(max=values.shape[1] - 1)
    return values.gather(1, inside.flatten(1)).view_as(positions)
