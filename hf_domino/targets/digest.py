"""A digest of a weight's bits, which tells whether the weight has changed.

Whoever writes to `weight.data`, as PEFT does when it merges an adapter, changes no version counter and no address, so
the contents have to be read.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

# Bytes that are read at once. They are read twice, so they have to stay in the cache of the processor.
BLOCK = 2**22
# Bytes that share one plain sum, and one weighted sum. There are as many different factors from -64 to 64 as a segment
# has bytes, and with larger factors than these, processors that add up pairs in 16 bits would lose the upper bits.
GROUP = 1024
SEGMENT = 128


def digest_of(weight: torch.Tensor) -> torch.Tensor:
    """Return sums over the bits of a weight, as int32.

    A plain sum of words sees any change of one element, but not a swap, and not a factor of two or minus one where the
    number of elements is even, because the upper bits overflow. A sum of bytes that are multiplied by different factors
    does not overflow and sees these.

    Args:
        weight (`torch.Tensor`): A weight on the CPU, of two or four bytes an element.
    """
    flat = weight.detach().contiguous().view(-1)  # a copy only where the weight is not contiguous
    if flat.storage_offset() * flat.itemsize % 4:
        flat = flat.clone()
    found = []
    for block in flat.split(BLOCK // flat.itemsize):
        if block.nbytes % GROUP:
            block = F.pad(block, (0, -block.nbytes % GROUP // block.itemsize))
        found.append(torch._int_mm(block.view(torch.int8).view(-1, SEGMENT), _factors()).flatten())
        found.append(block.view(torch.int32).view(-1, GROUP // 4).sum(dim=1, dtype=torch.int32))
    return torch.cat(found)


@cache
def _factors() -> torch.Tensor:
    """Return the factors of the bytes of a segment, `[SEGMENT, 1]` int8: all from -64 to 64 but 0, in a fixed order."""
    half = SEGMENT // 2
    factors = torch.arange(-half, half + 1, device="cpu")
    factors = factors[factors != 0]
    order = torch.randperm(SEGMENT, generator=torch.Generator().manual_seed(0), device="cpu")
    return factors[order].to(torch.int8)[:, None]
