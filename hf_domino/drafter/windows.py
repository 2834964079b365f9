"""Sliding windows: which keys the queries of a sliding layer see, within what the mask of all layers lets them see.

A query sees the `sliding_window` positions that end with its own, wherever in its block it stands. Inside the block it
sees what is before it, or, with `sliding_window_non_causal`, all of it. So do SpecForge (a6b6b02,
`specforge/algorithms/common/dflash_family_model.py`) and vLLM (`models/qwen3_dflash.py`, since its pull request 47914);
without the causal bound SGLang lost 0.35 of acceptance length (its pull request 34524).

Shapes: B batch, Q block positions, C new context positions, S context positions looked at, G query heads per key head.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_domino.configuration import DominoConfig
from hf_domino.drafter.backbone import AttentionInputs
from hf_domino.drafter.view import BlockView


def windowed(config: DominoConfig, inputs: AttentionInputs, positions: torch.Tensor, length: int) -> AttentionInputs:
    """What sliding layers share in one forward.

    Args:
        config (`DominoConfig`): One with sliding layers.
        inputs ([`AttentionInputs`]): What the other layers share.
        positions (`torch.Tensor`): Of new context and block, `[B, C + Q]`; with a cache, its slots count instead.
        length (`int`): Block positions (Q).
    """
    mask, cache = inputs.mask, inputs.cache
    if inputs.view is not None:
        return replace(inputs, view=_windowed_view(config, inputs.view))
    if cache is None:
        queries = positions[:, positions.shape[1] - length :]
        inside = _inside(config, queries, positions)
        return replace(inputs, mask=inside if mask is None else inside & mask)
    ends, slots = cache.window(config.sliding_window or 0)
    if config.sliding_window_non_causal and slots.stop + length <= (config.sliding_window or 0):
        return inputs  # nothing is out of reach yet
    queries = ends.to(positions.device)[:, None] + torch.arange(length, device=positions.device)
    context = torch.arange(slots.start, slots.stop, device=positions.device).expand(len(queries), -1)
    inside = _inside(config, queries, torch.cat((context, queries), dim=1))
    if mask is not None:
        inside = inside & mask[..., slots.start :]
    # Once for each query head of a key head: then no key has to be repeated for them.
    inside = inside.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)  # [B, 1, G * Q, S + Q]
    return replace(inputs, mask=inside, first=slots.start)


def _windowed_view(config: DominoConfig, view: BlockView) -> BlockView:
    """What blocks side by side see of what they see without windows."""
    steps = torch.arange(view.block_size, device=view.ends.device)  # [K]
    reach = view.ends[..., None] + steps - (config.sliding_window or 0) + 1  # [B, N, K]
    inside = _inside(config, steps[None], steps[None])[0, 0]  # [K, K]
    return replace(view, firsts=torch.maximum(view.firsts, reach), inside=inside & view.inside)


def _inside(config: DominoConfig, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Whether a key is in a query's window, `[B, 1, Q, S + Q]`, from their positions `[B, Q]` and `[B, S + Q]`."""
    queries, keys = queries[:, None, :, None], keys[:, None, None]
    inside = keys > queries - (config.sliding_window or 0)
    return inside if config.sliding_window_non_causal else inside & (keys <= queries)
