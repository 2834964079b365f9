"""The DFlash backbone (arXiv 2602.06036): Qwen3-style layers whose queries are the block's only.

Keys and values come from the context features and the block; attention inside a block is not causal, except in sliding
layers. A query of these sees the `sliding_window` positions that end with its own, wherever in its block it stands.
Inside the block it sees what is before it, or, with `sliding_window_non_causal`, all of it. So do SpecForge (a6b6b02,
`specforge/algorithms/common/dflash_family_model.py`) and vLLM (`models/qwen3_dflash.py`, since its pull request 47914);
without the causal bound SGLang lost 0.35 of acceptance length (its pull request 34524).

Around attention and MLP there may be convolutions over a block's positions, as in DFlash 2.

Shapes: B batch, Q block positions, C new context positions, S context positions looked at, H hidden size, A heads,
G query heads per key head, D head width, T taps of a convolution, or captured layers, L drafter layers.
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

from hf_domino.methods.context import ContextCache
from hf_domino.methods.side_by_side import BlockView, attend_side_by_side

if TYPE_CHECKING:
    from hf_domino.configuration.domino_config import DominoConfig
    from hf_domino.methods.block_config import BlockConfig


Sublayer = Callable[[torch.Tensor], torch.Tensor]
FALL = -2.0  # of fresh logits per captured layer away from the nearest: as DFlare begins, whose equal ones stayed equal


class RotaryTable:
    """Rotary embedding whose frequencies stay in fp32, whatever dtype the model is moved to.

    A registered buffer would be rounded by `.to(torch.bfloat16)`, which is radians of phase error at position 3000.
    """

    def __init__(self, config: DominoConfig):
        self.config = config
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}

    def __call__(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[B, T, D]` in fp32 of the absolute positions `[B, T]`."""
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
    """Inputs that layers share in one forward; full and sliding layers have their own.

    Args:
        context (`torch.Tensor`, *optional*): New context features `[B, C, H]`.
        rotary (`tuple`): Cosines and sines `[B, C + Q, D]` of the new context, then the block.
        mask (`torch.Tensor`, *optional*): `[B, 1, Q, S + Q]`, True where a query may look, `[B, 1, 1, S + Q]` for all
            queries, or `[B, 1, G * Q, S + Q]` for those of each of the G heads of a key head; None for everywhere.
        cache (`ContextCache`, *optional*): Context of earlier rounds; the new context is added to it.
        first (`int`, *optional*, defaults to 0): Cached position that S begins with.
        view (`BlockView`, *optional*): The view of blocks side by side; in place of mask and cache.
        convolved (`int`, *optional*): Positions of a block, which no convolution leaves.
    """

    context: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor]
    mask: torch.Tensor | None
    cache: ContextCache | None
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
        """Attend from the normed block `[B, Q, H]`; returns `[B, Q, H]`."""
        length = block.shape[1]
        # One product for the keys of context and block, then split: fewer and larger kernels than one for each.
        both = block if inputs.context is None else torch.cat((inputs.context, block), dim=1)  # [B, C + Q, H]
        queries = self.q_norm(self._split_heads(self.q_proj(block)))
        keys = self.k_norm(self._split_heads(self.k_proj(both)))
        values = self._split_heads(self.v_proj(both)).transpose(1, 2)  # [B, A, C + Q, D]
        cosines, sines = inputs.rotary
        start = both.shape[1] - length
        queries = rotate(queries.transpose(1, 2), cosines[:, start:], sines[:, start:], self.interleaved)
        keys = rotate(keys.transpose(1, 2), cosines, sines, self.interleaved)
        if inputs.cache is not None:
            keys, values = inputs.cache.join(self.layer_index, keys, values, length, inputs.first)
        dropout = self.dropout if self.training else 0.0
        if inputs.view is not None:
            attended = attend_side_by_side(queries, keys, values, inputs.view, dropout)
            return self.o_proj(attended.transpose(1, 2).flatten(2))
        per_head = queries.shape[1] // keys.shape[1] * length
        is_grouped = inputs.mask is not None and inputs.mask.shape[2] in (1, per_head)
        if is_grouped:  # the queries of a group of heads are queries of one head, and no key is repeated
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

    def _split_heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))  # [B, T, A, D]


class ZeroLinear(nn.Linear):
    """A linear layer whose fresh weights are zero: what it adds to is as it was without it."""


class BlockConvolution(nn.Module):
    """Convolutions of a sublayer's input and output, whose kernels follow the normed input."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        taps = config.conv_kernel_size or 0
        width = config.hidden_size
        self.shape = 2, taps, width // config.conv_group_size
        identity = torch.eye(taps)[0, :, None]  # [T, 1], of the position itself alone
        self.base_kernel = nn.Parameter(identity.repeat(2, 1, width))
        self.kernel_projection = ZeroLinear(width, 2 * taps * self.shape[2], bias=False)

    def forward(self, normed: torch.Tensor, sublayer: Sublayer, block_size: int) -> torch.Tensor:
        """What the sublayer makes of the normed input `[B, Q, H]`, both convolved."""
        changes = self.kernel_projection(normed).unflatten(-1, self.shape)
        before, after = changes.unbind(2)  # [B, Q, T, H / group]
        made = sublayer(convolve(normed, self.base_kernel[0], before, block_size))
        return convolve(made, self.base_kernel[1], after, block_size)


def convolve(states: torch.Tensor, base: torch.Tensor, changes: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sum each position's state and those of the T - 1 before it in its block, by its own kernels.

    Args:
        states (`torch.Tensor`): `[B, Q, H]`, of blocks side by side.
        base (`torch.Tensor`): The part of the kernels that all positions share, `[T, H]`.
        changes (`torch.Tensor`): Their own part, `[B, Q, T, H / group]`.
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
    """Fresh logits `[L, T]` of a drafter layer's weights: the captured layer at the same relative depth weighs most."""
    places = torch.arange(num_layers)[:, None] * ((num_captured - 1) / max(num_layers - 1, 1))
    return FALL * (torch.arange(num_captured) - places).abs()


class BackboneLayer(GradientCheckpointingLayer):
    """Pre-norm attention and MLP of the block; context features are not normed again."""

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
    """Apply RoPE in fp32 to `[B, A, T, D]` and return its dtype.

    Where neighbours `(2i, 2i + 1)` are turned together, they are first put where others have them, at `(i, i + D / 2)`:
    products of queries and keys do not depend on the order of their numbers.
    """
    wide = states.float()
    if interleaved:
        wide = wide.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return (wide * cosines[:, None] + rotate_half(wide) * sines[:, None]).to(states.dtype)


def windowed(config: BlockConfig, inputs: AttentionInputs, positions: torch.Tensor, length: int) -> AttentionInputs:
    """The inputs of sliding layers; `positions` are of new context and block, `[B, C + Q]`, and `length` is Q."""
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
        return inputs  # nothing is out of reach yet
    queries = ends.to(positions.device)[:, None] + torch.arange(length, device=positions.device)
    context = cache.positions(slots, positions.device).expand(len(queries), -1)
    inside = _inside(config, queries, torch.cat((context, queries), dim=1))
    if mask is not None:
        inside = inside & mask[..., slots.start - inputs.first :]
    # Once for each query head of a key head: then no key has to be repeated for them.
    inside = inside.repeat(1, 1, config.num_attention_heads // config.num_key_value_heads, 1)  # [B, 1, G * Q, S + Q]
    return replace(inputs, mask=inside, first=slots.start)


def _windowed_view(config: BlockConfig, view: BlockView) -> BlockView:
    """The view of blocks side by side, within windows."""
    steps = torch.arange(view.block_size, device=view.ends.device)  # [K]
    reach = view.ends[..., None] + steps - (config.sliding_window or 0) + 1  # [B, N, K]
    inside = _inside(config, steps[None], steps[None])  # [1, 1, K, K]
    return replace(view, firsts=reach.clamp(min=0).maximum(view.firsts), inside=inside[0, 0])


def _inside(config: BlockConfig, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Whether a key is in a query's window, `[B, 1, Q, S + Q]`, from their positions `[B, Q]` and `[B, S + Q]`."""
    queries = queries[:, None, :, None]
    keys = keys[:, None, None]
    inside = keys > queries - (config.sliding_window or 0)
    if config.sliding_window_non_causal:
        return inside
    return inside & (keys <= queries)
