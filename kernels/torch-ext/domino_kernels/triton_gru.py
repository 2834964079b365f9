"""One step of a bias-free GRU in one launch, which can include the embedding lookup.

Every program computes a few units of the next state: for each unit, it multiplies three gate rows by the embedding and
three by the state. All arithmetic is fp32; the next state is rounded once.

Shapes: B rows, V vocabulary, H width of embeddings, G width of the state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

UNITS = 4  # units per program: 256 programs at G = 1024, about two on each multiprocessor
MAX_CHUNK = 1024  # columns of the weights that are read at once
NUM_WARPS = 4


@triton.jit
def _gate_sums(source, weight, units, size, num_units, stride, CHUNK: tl.constexpr, UNITS: tl.constexpr):
    """Multiply the r, z and n rows of some units by one vector."""
    r = tl.zeros((UNITS,), tl.float32)
    z = tl.zeros((UNITS,), tl.float32)
    n = tl.zeros((UNITS,), tl.float32)
    units = units.to(tl.int64)[:, None]
    of_r = weight + units * stride
    of_z = weight + (units + num_units) * stride
    of_n = weight + (units + 2 * num_units) * stride
    for start in range(0, size, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        inside = columns < size
        mask = (units < num_units) & inside[None, :]
        x = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        r += tl.sum(tl.load(of_r + columns[None, :], mask=mask, other=0.0).to(tl.float32) * x, axis=1)
        z += tl.sum(tl.load(of_z + columns[None, :], mask=mask, other=0.0).to(tl.float32) * x, axis=1)
        n += tl.sum(tl.load(of_n + columns[None, :], mask=mask, other=0.0).to(tl.float32) * x, axis=1)
    return r, z, n


@triton.jit
def next_units(r, z, n, state_r, state_z, state_n, kept):
    """Compute units of the next state from their gates' sums over the token and over the state."""
    reset = tl.sigmoid(r + state_r)
    update = tl.sigmoid(z + state_z)
    candidate = 2.0 * tl.sigmoid(2.0 * (n + reset * state_n)) - 1.0  # tanh
    return candidate + update * (kept - candidate)


@triton.jit
def _gru_units(
    inputs, embedding, state, weight_ih, weight_hh, next_state,
    num_rows, input_size, num_units, input_stride, embedding_stride, state_stride, ih_stride, hh_stride,
    GATHER: tl.constexpr, UNITS: tl.constexpr, INPUT_CHUNK: tl.constexpr, STATE_CHUNK: tl.constexpr,
):  # fmt: skip
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    inside = units < num_units
    for row in range(num_rows):  # after the first row, the weights are in the cache
        if GATHER:
            source = embedding + tl.load(inputs + row * input_stride) * embedding_stride
        else:
            source = inputs + row * input_stride
        old = state + row * state_stride
        r, z, n = _gate_sums(source, weight_ih, units, input_size, num_units, ih_stride, INPUT_CHUNK, UNITS)
        state_r, state_z, state_n = _gate_sums(
            old, weight_hh, units, num_units, num_units, hh_stride, STATE_CHUNK, UNITS
        )
        kept = tl.load(old + units, mask=inside, other=0.0).to(tl.float32)
        result = next_units(r, z, n, state_r, state_z, state_n, kept)
        tl.store(next_state + row * num_units + units, result.to(next_state.dtype.element_ty), mask=inside)


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton version of [`domino_kernels.gru_step`]."""
    num_rows, num_units = state.shape
    next_state = torch.empty((num_rows, num_units), dtype=state.dtype, device=state.device)
    table = state if embedding is None else embedding  # a pointer is needed even if unused
    _gru_units[(triton.cdiv(num_units, UNITS),)](
        inputs, table, state, weight_ih, weight_hh, next_state,
        num_rows, weight_ih.shape[1], num_units,
        inputs.stride(0), table.stride(0), state.stride(0), weight_ih.stride(0), weight_hh.stride(0),
        GATHER=embedding is not None, UNITS=UNITS,
        INPUT_CHUNK=min(MAX_CHUNK, triton.next_power_of_2(weight_ih.shape[1])),
        STATE_CHUNK=min(MAX_CHUNK, triton.next_power_of_2(num_units)), num_warps=NUM_WARPS,
    )  # fmt: skip
    return next_state
