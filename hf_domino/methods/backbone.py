"""The DFlash backbone (arXiv 2602.06036): Qwen3-style layers in which only the block has queries.

Keys and values come from the context features and the block. Attention inside a block is not causal, except in sliding
layers. There, a query sees the last `sliding_window` positions up to its own, whatever its place in the block. Inside
the block it sees only itself and earlier positions, or all of them with `sliding_window_non_causal`. SpecForge
(a6b6b02, `specforge/algorithms/common/dflash_family_model.py`) and vLLM (`models/qwen3_dflash.py`, since its pull
request 47914) do the same. Without the causal bound, SGLang lost 0.35 of acceptance length (its pull request 34524).

As in DFlash 2, attention and MLP can be wrapped in convolutions over the positions of a block.

Shapes: B batch, Q block positions, C new context positions, S context positions attended to, H hidden size, A heads,
G query heads per key head, D head width, T taps of a convolution or captured layers, L drafter layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

from hf_domino.methods.context import DraftContext
from hf_domino.methods.side_by_side import BlockView, attend_side_by_side

if TYPE_CHECKING:
    from hf_domino.configuration.domino_config import DominoConfig
    from hf_domino.methods.block_config import BlockConfig


Sublayer = Callable[[torch.Tensor], torch.Tensor]
# Fresh fusion logits fall by 2 per captured layer of distance, as DFlare initialises them: logits that started equal
# stayed equal.
FUSION_LOGIT_SLOPE = -2.0


class RotaryTable:
    """Rotary embedding whose frequencies stay in fp32, whatever dtype the model is moved to.

    `.to(torch.bfloat16)` would round a registered buffer, which causes radians of phase error at position 3000.
    """

    def __init__(self, config: DominoConfig):
        self.config = config
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}

    def __call__(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines `[B, T, D]` in fp32 for absolute positions `[B, T]`."""
        device = position_ids.device
        if device not in self._frequencies:
            self._frequencies[device] = self._compute(device)
        frequencies, scaling = self._frequencies[device]
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * scaling, angles.sin() * scaling

    def _compute(self, device: torch.device) -> tuple[torch.Tensor, float]:
        rope = self.config.rope_parameters or {}
        if rope.get("rope_type", "default") != "default":
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, device)
            return frequencies.float().to(device), scaling
        exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device=device) / self.config.head_dim
        return rope["rope_theta"] ** -exponents, 1.0


@dataclass
class AttentionInputs:
    """Inputs that the layers share in one forward; full and sliding layers each have their own instance.

    Args:
        context (`torch.Tensor`, *optional*): New context features `[B, C, H]`.
        rotary (`tuple`): Cosines and sines `[B, C + Q, D]` of the new context, then the block.
        mask (`torch.Tensor`, *optional*): True where a query may attend: `[B, 1, Q, S + Q]`, or `[B, 1, 1, S + Q]` if
            it is the same for all queries, or `[B, 1, G * Q, S + Q]` if it is repeated for the G query heads of each
            key head. None if every query may attend everywhere.
        cache ([`DraftContext`], *optional*): Context of earlier rounds; the new context is added to it.
        first (`int`, *optional*, defaults to 0): Cached position at which S begins.
        view (`BlockView`, *optional*): What each of several parallel blocks sees; replaces mask and cache.
        convolved (`int`, *optional*): Positions of a block; no convolution reaches beyond its block.
    """

    context: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    cache: DraftContext | None
    first: int = 0
    view: BlockView | None = None
    convolved: int | None = None


class ContextAttention(nn.Module):
    """Attention of a block's positions over the context features and the whole block."""

    def __init__(self, config: BlockConfig, layer_index: int):
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.interleaved = config.rope_interleaved
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, block: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Attend from the normalised block `[B, Q, H]`; returns `[B, Q, H]`."""
        length = block.shape[1]
        # Project context and block together and split the result later: this launches fewer and larger kernels.
        both = block if inputs.context is None else torch.cat((inputs.context, block), dim=1)  # [B, C + Q, H]
        queries = self.q_norm(self._split_heads(self.q_proj(block)))
        keys, values = self.project(both, inputs.rotary)
        cosines, sines = inputs.rotary
        start = both.shape[1] - length
        queries = rotate(queries.transpose(1, 2), cosines[:, start:], sines[:, start:], self.interleaved)
        if inputs.cache is not None:
            keys, values = inputs.cache.join(self.layer_index, keys, values, length, inputs.first)
        dropout = self.dropout if self.training else 0.0
        if inputs.view is not None:
            attended = attend_side_by_side(queries, keys, values, inputs.view, dropout)
            return self.o_proj(attended.transpose(1, 2).flatten(2))
        per_head = queries.shape[1] // keys.shape[1] * length
        is_grouped = inputs.mask is not None and inputs.mask.shape[2] in (1, per_head)
        if is_grouped:  # the query heads of a group become more queries of one head, so that no key is repeated
            queries = queries.reshape(len(block), keys.shape[1], per_head, self.head_dim)
        attended = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=inputs.mask,
            dropout_p=dropout,
            enable_gqa=not is_grouped,
        )
        attended = attended.reshape(len(block), self.num_heads, length, self.head_dim)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def project(
        self, read: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute keys and values `[B, A, T, D]` of context features or block positions, `[B, T, H]`."""
        keys = self.k_norm(self._split_heads(self.k_proj(read))).transpose(1, 2)
        values = self._split_heads(self.v_proj(read)).transpose(1, 2)
        return rotate(keys, *rotary, self.interleaved), values

    def _split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))  # [B, T, A, D]


class ZeroLinear(nn.Linear):
    """A linear layer whose fresh weights are zero, so that it adds nothing until it is trained."""


class BlockConvolution(nn.Module):
    """Convolves a sublayer's input and output; the kernels depend on the normalised input."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        taps = config.conv_kernel_size or 0
        width = config.hidden_size
        self.shape = 2, taps, width // config.conv_group_size
        identity = torch.eye(taps)[0, :, None]  # [T, 1], only the position itself
        self.base_kernel = nn.Parameter(identity.repeat(2, 1, width))
        self.kernel_projection = ZeroLinear(width, 2 * taps * self.shape[2], bias=False)

    def forward(self, normed: torch.Tensor, sublayer: Sublayer, block_size: int) -> torch.Tensor:
        """Convolve the normalised input `[B, Q, H]`, run the sublayer on it, and convolve the output."""
        changes = self.kernel_projection(normed).unflatten(-1, self.shape)
        before, after = changes.unbind(2)  # [B, Q, T, H / group]
        made = sublayer(convolve(normed, self.base_kernel[0], before, block_size))
        return convolve(made, self.base_kernel[1], after, block_size)


def convolve(states: torch.Tensor, base: torch.Tensor, changes: torch.Tensor, block_size: int) -> torch.Tensor:
    """Replace each state by a weighted sum of itself and the T - 1 states before it in its block.

    Args:
        states (`torch.Tensor`): States of one or more blocks, one block after the other, `[B, Q, H]`.
        base (`torch.Tensor`): The part of the kernels that all positions share, `[T, H]`.
        changes (`torch.Tensor`): The part that each position adds to it, `[B, Q, T, H / group]`.
        block_size (`int`): Positions of a block.
    """
    grouped = states.unflatten(-1, (changes.shape[-1], -1))  # [B, Q, H / group, group]
    kernels = (base.view(len(base), *grouped.shape[2:]) + changes[..., None]).unbind(2)
    places = torch.arange(states.shape[1], device=states.device)[:, None, None] % block_size
    total = grouped * kernels[0]
    for tap, kernel in enumerate(kernels[1:], 1):
        total = torch.addcmul(total, grouped.roll(tap, 1).masked_fill(places < tap, 0.0), kernel)
    return total.flatten(2)


def depth_matched(num_layers: int, num_captured: int) -> torch.Tensor:
    """Return fresh fusion logits `[L, T]`: each drafter layer prefers the captured layer at the same relative depth."""
    places = torch.arange(num_layers)[:, None] * ((num_captured - 1) / max(num_layers - 1, 1))
    return FUSION_LOGIT_SLOPE * (torch.arange(num_captured) - places).abs()


class BackboneLayer(GradientCheckpointingLayer):
    """Pre-norm attention and MLP of the block; context features are not normalised again."""

    def __init__(self, config: BlockConfig, layer_index: int):
        super().__init__()
        self.self_attn = ContextAttention(config, layer_index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.conv_kernel_size is not None:
            self.attention_conv = BlockConvolution(config)
            self.mlp_conv = BlockConvolution(config)

    def forward(self, block: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """Transform the block `[B, Q, H]`."""
        attend = partial(self.self_attn, inputs=inputs)
        feed = self.mlp
        if inputs.convolved is not None:
            attend = partial(self.attention_conv, sublayer=attend, block_size=inputs.convolved)
            feed = partial(self.mlp_conv, sublayer=feed, block_size=inputs.convolved)
        block = block + attend(self.input_layernorm(block))
        return block + feed(self.post_attention_layernorm(block))


def rotate(states: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Apply RoPE in fp32 to states `[B, A, T, D]` and return them in their own dtype.

    With `interleaved`, RoPE rotates the neighbours `(2i, 2i + 1)` together. They are first moved to `(i, i + D / 2)`,
    where the default layout has them: products of queries and keys do not depend on the order of their elements.
    """
    wide = states.float()
    if interleaved:
        wide = wide.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return (wide * cosines[:, None] + rotate_half(wide) * sines[:, None]).to(states.dtype)


def windowed(config: BlockConfig, inputs: AttentionInputs, positions: torch.Tensor, length: int) -> AttentionInputs:
    """Derive the inputs of sliding layers from positions `[B, C + Q]` of new context and block; `length` is Q."""
    mask = inputs.mask
    cache = inputs.cache
    if inputs.view is not None:
        return replace(inputs, view=_windowed_view(config, inputs.view))
    if cache is None:
        queries = positions[:, positions.shape[1] - length :]
        inside = _inside(config, queries, positions)
        return replace(inputs, mask=inside if mask is None else inside & mask)
    ends, slots = cache.window(config.sliding_window or 0)
    if config.sliding_window_non_causal and slots.stop + length <= (config.sliding_window or 0):
        return inputs  # everything is within the window so far
    queries = ends.to(positions.device)[:, None] + torch.arange(length, device=positions.device)
    context = cache.positions(slots, positions.device).expand(len(queries), -1)
    inside = _inside(config, queries, torch.cat((context, queries), dim=1))
    if mask is not None:
        inside = inside & mask[..., slots.start - inputs.first :]
    # Repeated for each query head of a key head, so that the keys need not be repeated.
    inside = inside.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)  # [B, 1, G * Q, S + Q]
    return replace(inputs, mask=inside, first=slots.start)


def _windowed_view(config: BlockConfig, view: BlockView) -> BlockView:
    """Restrict what parallel blocks see to their windows."""
    steps = torch.arange(view.block_size, device=view.ends.device)  # [K]
    reach = view.ends[..., None] + steps - (config.sliding_window or 0) + 1  # [B, N, K]
    inside = _inside(config, steps[None], steps[None])  # [1, 1, K, K]
    return replace(view, firsts=reach.clamp(min=0).maximum(view.firsts), inside=inside[0, 0])


def _inside(config: BlockConfig, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Whether each key is in each query's window, `[B, 1, Q, S + Q]`, by their positions `[B, S + Q]` and `[B, Q]`."""
    queries = queries[:, None, :, None]
    keys = keys[:, None, None]
    inside = keys > queries - (config.sliding_window or 0)
    if config.sliding_window_non_causal:
        return inside
    return inside & (keys <= queries)
