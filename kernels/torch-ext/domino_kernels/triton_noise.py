"""Gumbel noise as a kernel of its own: inside another, all threads of a warp would draw the numbers of its columns.

Shapes: B rows, N columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _draw(random_state, noise, num_columns, BLOCK: tl.constexpr):
    # The arithmetic of noise.gumbel. tl has no log1p: log(y) * u / (1 - y) with y = 1 - u is one, also for tiny u.
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    seed = tl.load(random_state)
    offset = tl.load(random_state + 1)
    low = columns * 0 + (offset & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = columns * 0 + (offset >> 32).to(tl.int32)
    word, _, _, _ = tl.philox(seed, columns, columns * 0 + row, low, high)
    uniform = ((word >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.9999999403953552)
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    tl.store(noise + row.to(tl.int64) * num_columns + columns, -tl.log(exponential), mask=columns < num_columns)


def gumbel(random_state: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Triton version of [`domino_kernels.noise.gumbel`]; see there."""
    noise = torch.empty((num_rows, num_columns), dtype=torch.float32, device=random_state.device)
    _draw[(triton.cdiv(num_columns, BLOCK), num_rows)](random_state.contiguous(), noise, num_columns, BLOCK=BLOCK)
    return noise
