"""Rewinding recurrent states: what linear-attention and state-space layers keep cannot be cropped token by token.

Their states are copied before a verification forward and put back where a proposal was rejected; the committed tokens
are then run once more. Attention layers are cropped as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

# In place of layers that keep nothing (they use the keys of others, or have no attention); older versions of
# Transformers leave those out.
PLACEHOLDERS = (cache_utils.DummyLayer,) if hasattr(cache_utils, "DummyLayer") else ()
_STATES = ("conv_states", "recurrent_states", "has_previous_state")


def recurrent_layers(cache: Any) -> list[Any]:
    """Layers of a cache that keep recurrent or convolution states."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, LinearAttentionCacheLayerMixin)]


def activate_past_recording(cache: Any) -> None:
    """Let sliding-window layers remember what they need to step back; recurrent layers are rewound by a snapshot."""
    cache.activate_past_recording()
    for layer in recurrent_layers(cache):
        if not isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def end_past_recording(cache: Any) -> None:
    """Let sliding-window layers keep their window only, as plain generation does."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.record_past = False


def crop_attention(cache: Any, num_positions: int) -> None:
    """Drop the last `num_positions` positions of the attention layers, and of the attention part of mixed ones."""
    for layer in cache.layers:
        if (kind := attention_kind(layer)) is not None:
            kind.crop(layer, -num_positions)


def crop_attention_to(cache: Any, length: int) -> None:
    """Drop all positions behind the first `length`; layers may differ where a forward was broken off."""
    for layer in cache.layers:
        kind = attention_kind(layer)
        if kind is not None and layer.is_initialized:
            kind.crop(layer, -max(kind.get_seq_length(layer) - length, 0))


def move_forward(cache: Any, path: torch.Tensor, num_checked: int) -> None:
    """Move some of the last `num_checked` positions to their front, in place.

    Args:
        cache (`Cache`): Layers of `DynamicLayer`.
        path (`torch.Tensor`): Which, among those last ones, `[B, C]`.
        num_checked (`int`): Positions of the block.
    """
    for layer in cache.layers:
        if isinstance(layer, PLACEHOLDERS) or layer.keys is None:
            continue
        start, index = layer.keys.shape[2] - num_checked, path.to(layer.keys.device)
        for states in (layer.keys, layer.values):
            block = states[:, :, start:]
            if len(path) == 1:
                block[:, :, : path.shape[1]] = block.index_select(2, index[0])
            else:
                where = index[:, None, :, None].expand(-1, block.shape[1], -1, block.shape[3])
                block[:, :, : path.shape[1]] = block.gather(2, where)


def attention_kind(layer: Any) -> Any:
    """The class that keeps a layer's keys and values; None where it has none."""
    if isinstance(layer, PLACEHOLDERS):
        return None
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return type(layer)
    kinds = (DynamicSlidingWindowLayer, DynamicLayer)
    return next((kind for kind in kinds if isinstance(layer, kind)), None)


class StateSnapshot:
    """Copies of all recurrent states of a cache.

    Args:
        cache (`Cache`): The target's cache, just before a verification forward.
    """

    def __init__(self, cache: Any):
        self._saved = [
            (layer, {name: _clone(getattr(layer, name)) for name in _STATES if hasattr(layer, name)})
            for layer in recurrent_layers(cache)
        ]

    def restore(self) -> None:
        """Put copies of the states back: the forward that follows may be broken off in the middle of a layer."""
        for layer, states in self._saved:
            for name, value in states.items():
                setattr(layer, name, _clone(value))


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value
