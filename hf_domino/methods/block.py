"""The base of all methods whose backbone drafts a block from context features (DFlash, arXiv 2602.06036).

The block of an anchor at position a covers positions a..a+K-1. It sees itself and the context strictly before a. Its
drafts are used as they are, or corrected by a head that a method adds.

Shapes: B batch, Q block positions, C new context positions, S all context positions or sequence length, N blocks per
sequence, K block size, P proposals, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_domino.methods.backbone import AttentionInputs, BackboneLayer, RotaryTable, depth_matched, windowed
from hf_domino.methods.block_config import BlockConfig
from hf_domino.methods.context import NO_CONTEXT, NewContext
from hf_domino.methods.modeling import DominoDraftModel
from hf_domino.methods.side_by_side import BlockView, block_positions

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel


class BlockModel(DominoDraftModel):
    """A drafter whose backbone drafts a block at once; subclasses can add a correction head."""

    config_class = BlockConfig
    config: BlockConfig
    main_input_name = "noise_embeds"
    _no_split_modules = ["BackboneLayer"]

    def build(self) -> None:  # modules have the names of the released checkpoints
        config = self.config
        self.fc = nn.Linear(config.num_captured * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(BackboneLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.layer_fusion:
            self.layer_fusion_weights = nn.Parameter(depth_matched(config.num_hidden_layers, config.num_captured))
        self._rotary = RotaryTable(config)

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(tuple(hidden_states), dim=-1)
        joined = joined.to(self.fc.weight)
        features = self.fc(joined)
        if self.config.layer_fusion:  # every drafter layer gets its own features; they are concatenated
            shares = self.layer_fusion_weights.float().softmax(dim=-1).to(joined.dtype)
            mixed = shares @ joined.unflatten(-1, (self.config.num_captured, -1))  # [B, C, L, H]
            return self.hidden_norm(features[..., None, :] + mixed).flatten(2)
        return self.hidden_norm(features)

    def draft_states(
        self,
        noise_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context_features: torch.Tensor | None = None,
        context_position_ids: torch.Tensor | None = None,
        view: BlockView | None = None,
        cache: Any = None,
        context_counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Compute draft hidden states `[B, Q, H]` of one block, or of several blocks in parallel.

        Args:
            noise_embeds (`torch.Tensor`): Target embeddings of anchor and masks, `[B, Q, H]`.
            position_ids (`torch.Tensor`): Absolute positions `[B, Q]`.
            context_features (`torch.Tensor`, *optional*): New context `[B, C, H]`, as `fuse_context` returns it.
            context_position_ids (`torch.Tensor`, *optional*): Its absolute positions `[B, C]`.
            view (`BlockView`, *optional*): What each of several parallel blocks sees, windows included; None for one
                block, which sees itself and all context.
            cache (`ContextCache`, *optional*): Context of earlier rounds; the new context is added to it.
            context_counts (`Sequence[int]`, *optional*): With a cache, how many of each sequence's new context
                positions are valid, counted from the first; None for all.
        """
        mask = None
        first = 0
        window = self.config.draft_window_size
        if window is not None and cache is None and view is None and context_features is not None:
            context_features = context_features[:, -window:]
            context_position_ids = None if context_position_ids is None else context_position_ids[:, -window:]
        if cache is not None:
            num_new = 0 if context_features is None else context_features.shape[1]
            visible = cache.begin(len(noise_embeds), num_new, context_counts)  # [B, S]
            first = cache.first
            if visible is not None:  # covers the context; the block itself is always visible
                mask = F.pad(visible, (0, noise_embeds.shape[1]), value=True)[:, None, None].to(noise_embeds.device)
        if context_position_ids is not None:
            position_ids = torch.cat((context_position_ids, position_ids), dim=1)
        length = noise_embeds.shape[1]
        convolved = None
        if self.config.conv_kernel_size is not None:
            convolved = length if view is None else view.block_size
        inputs = AttentionInputs(context_features, self._rotary(position_ids), mask, cache, first, view, convolved)
        if self.config.has_sliding_layers:
            sliding = windowed(self.config, inputs, position_ids, length)
        else:
            sliding = inputs
        block = noise_embeds.to(self.fc.weight)
        contexts = self._contexts(context_features)
        for index, layer in enumerate(self.layers):
            own = sliding if self.config.is_sliding(index) else inputs
            block = layer(block, own if contexts is None else replace(own, context=contexts[index]))
        if cache is not None:
            cache.advance()
        return self.norm(block)

    def _contexts(self, features: torch.Tensor | None) -> Sequence[torch.Tensor] | None:
        """The features `[B, C, H]` of each layer, if every layer has its own."""
        if features is None or not self.config.layer_fusion:
            return None
        return features.unflatten(-1, (len(self.layers), -1)).unbind(-2)

    def store(self, new: NewContext, cache: Any) -> None:
        assert new.features is not None
        assert new.positions is not None
        cache.begin(len(new.features), new.features.shape[1], new.counts)
        rotary = self._rotary(new.positions)
        contexts = self._contexts(new.features) or [new.features] * len(self.layers)
        for index, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            cache.append(index, *attention.project(contexts[index], rotary))
        cache.advance()

    def embed(self, target: TargetModel, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens `[B, Q]` for the backbone: `[B, Q, H]`."""
        embeds = target.embed(token_ids, self.config.input_embedding_scale)
        return embeds.to(self.device)

    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        new: NewContext | None,
        cache: Any,
        last_tokens: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        config = self.config
        features, feature_positions, counts = new or NO_CONTEXT
        masks = anchors.new_full((len(anchors), (config.block_size - 1) * anchors.shape[1]), config.mask_token_id)
        block = torch.cat((anchors, masks), dim=1)
        draft_hidden = self(
            self.embed(target, block.long()),
            positions + torch.arange(block.shape[1], device=self.device),
            features,
            feature_positions,
            cache=cache,
            context_counts=counts,
        )
        proposing = slice(config.label_offset, config.label_offset + config.num_draft_tokens)
        return self.finish(draft_hidden)[:, proposing]

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Let a method add what it computes from full blocks to their draft hidden states `[..., K, H]`.

        The states can also be those of no block, `[..., 0, H]`.
        """
        return hidden

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.logits(target, hidden, self.scaling)

    @property
    def scaling(self) -> BlockConfig | None:
        """The configuration, if it sets its own scale or cap of the logits; None if the target's apply."""
        config = self.config
        has_own_scaling = config.output_multiplier is not None or config.final_logit_softcapping is not None
        return config if has_own_scaling else None

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        size = self.config.block_size
        device = self.device
        num_context = 0 if features is None else features.shape[1]
        positions = block_positions(anchors, size)  # [B, N, K]
        noise_ids = torch.full_like(positions, self.config.mask_token_id)
        noise_ids[..., 0] = input_ids.gather(1, positions[..., 0])
        hidden = self.draft_states(
            noise_embeds=self.embed(target, noise_ids.flatten(1)),
            position_ids=positions.flatten(1).to(device),
            context_features=features,
            context_position_ids=torch.arange(num_context, device=device).expand(len(anchors), -1),
            view=BlockView.at(anchors, size, num_context, self.config.draft_window_size).to(device),
        )
        return self.finish(hidden.unflatten(1, positions.shape[1:]))
