"""Proofs that a product computes each row with the same bits, however many rows there are.

A text can only be that of plain decoding bit for bit if the products of a block of positions equal those of single
positions. Whether they do depends on how a processor adds up, which differs by shape, dtype and number of threads, but
not by the values, so it is tried out once for each.

Shapes: N rows (positions), O outputs and I inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

# Numbers of rows that are compared: two, a block, the longest block, and a batch of blocks.
COUNTS = 2, 9, 32, 64
# Outputs that are compared for each number of rows. If the order of a sum differs, about a tenth of bfloat16's do.
ENOUGH = 256

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # of values `[N, I]` and a bias `[O]`


@dataclass(frozen=True)
class RowBits:
    """What has been proved about the rows of a product."""

    most: int  # up to this number of rows, from two on, each has the same bits; 1 if not even two have them
    is_single_padded: bool  # whether a single row has these bits only as one of two rows

    @property
    def are_equal(self) -> bool:
        """Whether products of all block lengths can have the same bits."""
        return self.most > 1


AS_THEY_ARE = RowBits(COUNTS[-1], is_single_padded=False)  # the same bits for all numbers of rows, without any help


def prove(product: Product, num_inputs: int, dtype: torch.dtype) -> RowBits:
    """Compare the rows of products of different numbers of rows.

    Args:
        product (`Callable`): Multiplies rows with a weight, and adds a bias.
        num_inputs (`int`): Inputs of a row.
        dtype (`torch.dtype`): Of the weight.
    """
    random = torch.Generator().manual_seed(0)
    most = COUNTS[-1]
    is_single_padded = False
    num_compared = 0
    while num_compared < ENOUGH:
        row = torch.randn(1, num_inputs, generator=random, device="cpu").to(dtype)
        # The bias takes away the first digits of each sum, so that a narrow dtype shows the last ones, too.
        bias = -product(row, None)[0]
        pair = product(row.expand(2, -1), bias)
        is_single_padded |= not torch.equal(product(row, bias), pair[:1])
        smaller = 1
        for count in COUNTS:
            rows = product(row.expand(count, -1), bias)
            if not torch.equal(rows, pair[:1].expand_as(rows)):
                most = min(most, smaller)
                break
            smaller = count
        num_compared += bias.numel()
    return RowBits(most, is_single_padded)
