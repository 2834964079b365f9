"""Attention of blocks side by side on a GPU, by PyTorch's flex attention: tiles of keys that nothing sees are skipped.

Shapes: B batch, A query heads, E key heads, N blocks per row, K block size, C context positions, D head width.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from hf_domino.drafter.view import BlockView

MIN_WIDTH = 16  # of its matrix products


def can_flex(queries: torch.Tensor) -> bool:
    """Whether flex attention has a kernel for queries `[..., D]` of such a device, dtype and width."""
    is_taken = queries.is_cuda and queries.dtype != torch.float64 and queries.shape[-1] >= MIN_WIDTH
    return is_taken and importlib.util.find_spec("triton") is not None


def mask_mod(view: BlockView) -> Callable[..., torch.Tensor]:
    """What flex attention asks about single pairs: whether query q `[N * K]` of row b sees key k `[C + N * K]`."""
    size, num_context, last = view.block_size, view.num_context, view.num_queries - 1
    firsts, ends, inside = view.firsts.flatten(1), view.ends, view.inside

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        # Tiles reach behind the last query and key.
        query, own = query.clamp(max=last), (key - num_context).clamp(0, last)
        context = (key >= firsts[row, query]) & (key < ends[row, query // size])
        block = (key >= num_context) & (own // size == query // size) & inside[query % size, own % size]
        return context | block

    return sees


@functools.lru_cache(maxsize=2)  # of a batch's full layers, and of its sliding layers
def block_mask(view: BlockView) -> Any:
    """The view as flex attention wants it (`BlockMask`), made once for all layers that share it."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = str(view.ends.device)
    return create_block_mask(mask_mod(view), len(view.ends), None, view.num_queries, view.num_keys, device)


def flex_block_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: BlockView
) -> torch.Tensor:
    """Attention under `view.mask`, without the tiles of which nothing is seen.

    Args:
        queries (`torch.Tensor`): `[B, A, N * K, D]`.
        keys (`torch.Tensor`): Context, then blocks, `[B, E, C + N * K, D]`.
        values (`torch.Tensor`): Likewise.
        view (`BlockView`): What each block sees.

    Returns:
        `torch.Tensor`: `[B, A, N * K, D]`.
    """
    attend = _compiled() if queries.is_cuda else _eager()
    return attend(queries, keys, values, block_mask=block_mask(view), enable_gqa=queries.shape[1] != keys.shape[1])


def _eager() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(_eager())
