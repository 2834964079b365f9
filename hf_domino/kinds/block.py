"""DFlash, and what all kinds share whose backbone drafts a block from context features (arXiv 2602.06036).

The block of anchor a stands at positions a..a+K-1 and sees the context strictly before a and itself. What it drafts is
taken as it is, or corrected by a head that a kind adds.

Shapes: B batch, Q block positions, C new context positions, S all context positions or sequence length, N blocks per
row, K block size, P proposals, H hidden size. Of heads: N rows or lanes, T tokens, G width of a state, R width of what
W2 reads, M candidates, D tokens that are drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_domino.kinds.backbone import AttentionInputs, BackboneLayer, RotaryTable, windowed
from hf_domino.kinds.kind import Kind
from hf_domino.kinds.side_by_side import BlockView, block_positions

if TYPE_CHECKING:
    from hf_domino.target.view import TargetModel

DFLASH_LINK = "[DFlash](https://arxiv.org/abs/2602.06036)"


def partial_product(layer: nn.Module, values: torch.Tensor, first: int = 0, biased: bool = False) -> torch.Tensor:
    """Multiply a part of a linear layer's input, whose other columns are multiplied elsewhere.

    Args:
        layer (`nn.Module`): A linear layer, or PEFT's wrapper around one, which counts its adapters.
        values (`torch.Tensor`): The part `[..., P]`.
        first (`int`, *optional*, defaults to 0): The column of the layer that the part begins with.
        biased (`bool`, *optional*, defaults to `False`): Whether this part brings the layer's bias.
    """
    weight: Any = layer.weight
    bias: Any = layer.bias
    if type(layer) is nn.Linear:
        return F.linear(values, weight[:, first : first + values.shape[-1]], bias if biased else None)
    product = layer(F.pad(values, (first, weight.shape[1] - first - values.shape[-1])))
    return product if biased or bias is None else product - bias


class CorrectionHead(ABC):
    """A correction head, which says how the scores of a position depend on the tokens chosen before it.

    All have one form: corrected_k = base_k + W2 activate(part_k, state_k). The part is of the draft hidden state and is
    made once for the block; the state has read the tokens before, and is zero before the anchor.
    """

    state_size: int  # G
    # Of Domino's, whose input products can be kept by token, and which kernels know.
    gru: Any = None
    project_state: Any = None

    @property
    @abstractmethod
    def up(self) -> nn.Linear:
        """The layer of W2, `[D, R]`."""

    def initial_state(self, num_rows: int) -> torch.Tensor:
        """The zero state `[N, G]` that every block starts from."""
        return self.up.weight.new_zeros(num_rows, self.state_size)

    @abstractmethod
    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """The part of draft hidden states `[..., H]`, of a width of its own."""

    @abstractmethod
    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        """Read a token `[N]` before positions of these parts: the states before `[N, G]` to those with them."""

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Read known tokens `[N, T]` from the start, each before a position `[N, T, H]`: states `[N, T, G]`."""
        states = [self.initial_state(len(token_ids))]
        for tokens, part in zip(token_ids.unbind(1), self.project_hidden(draft_hidden).unbind(1), strict=True):
            states.append(self.step(target, tokens, states[-1], part))
        return torch.stack(states[1:], dim=1)

    @abstractmethod
    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What W2 reads `[..., R]` of the parts of positions and the states with them `[..., G]`."""

    def narrow(self, base_logits: torch.Tensor) -> torch.Tensor:
        """Base logits `[..., D]` in which what cannot be drafted is as good as forbidden."""
        return base_logits

    def fits_kernels(self, device: torch.device) -> bool:
        """Whether fused kernels correct by it on a device."""
        return False

    def rows(self, columns: torch.Tensor) -> torch.Tensor:
        """The rows of W2 of some tokens: their columns `[...]` to `[..., R]`."""
        return F.embedding(columns.to(self.up.weight.device), self.up.weight)

    def expand(self, activated: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Corrections `[..., D]` of what W2 reads `[..., R]`, or `[N, L, M]` by rows `[N, M, R]`."""
        return self.up(activated) if rows is None else activated @ rows.mT


class Block(Kind):
    """A backbone that drafts a block at once; a head that corrects it is a kind's own."""

    def build(self) -> None:
        """See [`Kind`]; the names are those of the releases."""
        drafter, config = self.drafter, self.config
        drafter.fc = nn.Linear(config.num_captured * config.hidden_size, config.hidden_size, bias=False)
        drafter.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        drafter.layers = nn.ModuleList(BackboneLayer(config, index) for index in range(config.num_hidden_layers))
        drafter.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        drafter._rotary = RotaryTable(config)

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """See [`Kind`]."""
        fc = self.drafter.fc
        return self.drafter.hidden_norm(fc(torch.cat(tuple(hidden_states), dim=-1).to(fc.weight)))

    def forward(
        self,
        noise_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context_features: torch.Tensor | None = None,
        context_position_ids: torch.Tensor | None = None,
        view: BlockView | None = None,
        cache: Any = None,
        context_counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Draft hidden states `[B, Q, H]` of one block, or of several side by side.

        Args:
            noise_embeds (`torch.Tensor`): Target embeddings of anchor and masks, `[B, Q, H]`.
            position_ids (`torch.Tensor`): Absolute positions `[B, Q]`.
            context_features (`torch.Tensor`, *optional*): New context `[B, C, H]`, as `fuse_context` returns it.
            context_position_ids (`torch.Tensor`, *optional*): Its absolute positions `[B, C]`.
            view (`BlockView`, *optional*): What blocks side by side see; None for one block, which sees all context
                and itself. Windows are within it.
            cache (`ContextCache`, *optional*): Context of earlier rounds; the new context is added to it.
            context_counts (`Sequence[int]`, *optional*): How much of each row's new context is valid, the first
                positions, where a cache is given; None for all.
        """
        mask, drafter = None, self.drafter
        if cache is not None:
            num_new = 0 if context_features is None else context_features.shape[1]
            visible = cache.begin(len(noise_embeds), num_new, context_counts)  # [B, S]
            if visible is not None:  # of the context; and all of the block itself
                mask = F.pad(visible, (0, noise_embeds.shape[1]), value=True)[:, None, None].to(noise_embeds.device)
        if context_position_ids is not None:
            position_ids = torch.cat((context_position_ids, position_ids), dim=1)
        length, convolved = noise_embeds.shape[1], None
        if self.config.conv_kernel_size is not None:
            convolved = length if view is None else view.block_size
        inputs = AttentionInputs(
            context_features, drafter._rotary(position_ids), mask, cache, view=view, convolved=convolved
        )
        sliding = windowed(self.config, inputs, position_ids, length) if self.config.has_sliding_layers else inputs
        block = noise_embeds.to(drafter.fc.weight)
        for index, layer in enumerate(drafter.layers):
            block = layer(block, sliding if self.config.is_sliding(index) else inputs)
        if cache is not None:
            cache.advance()
        return drafter.norm(block)

    def embed(self, target: TargetModel, token_ids: torch.Tensor) -> torch.Tensor:
        """What the backbone reads of tokens `[B, Q]`: their embeddings `[B, Q, H]`."""
        embeds = target.embed(token_ids, self.config.input_embedding_scale)
        return embeds.to(self.drafter.device)

    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_positions: torch.Tensor | None,
        cache: Any,
        counts: Sequence[int] | None = None,
        endings: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See [`Kind`]."""
        config, device = self.config, self.drafter.device
        masks = anchors.new_full((len(anchors), (config.block_size - 1) * anchors.shape[1]), config.mask_token_id)
        block = torch.cat((anchors, masks), dim=1)
        draft_hidden = self.drafter(
            self.embed(target, block.long()),
            positions + torch.arange(block.shape[1], device=device),
            features,
            feature_positions,
            cache=cache,
            context_counts=counts,
        )
        return draft_hidden[:, config.label_offset : config.label_offset + config.num_draft_tokens]

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        """See [`Kind`]; scaled and capped as the files say, or else as the target's own are."""
        config = self.config
        is_told = config.output_multiplier is not None or config.final_logit_softcapping is not None
        return self.drafter.vocabulary.logits(target, hidden, config if is_told else None)

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """See [`Kind`]."""
        size, device = self.config.block_size, self.drafter.device
        num_context = 0 if features is None else features.shape[1]
        positions = block_positions(anchors, size)  # [B, N, K]
        noise_ids = torch.full_like(positions, self.config.mask_token_id)
        noise_ids[..., 0] = input_ids.gather(1, positions[..., 0])
        hidden = self.forward(
            noise_embeds=self.embed(target, noise_ids.flatten(1)),
            position_ids=positions.flatten(1).to(device),
            context_features=features,
            context_position_ids=torch.arange(num_context, device=device).expand(len(anchors), -1),
            view=BlockView.at(anchors, size, num_context).to(device),
        )
        return hidden.unflatten(1, positions.shape[1:])


class DFlash(Block):
    """Plain DFlash: the drafts of a block are taken as they are."""

    title = "DFlash"
    link = f"plain {DFLASH_LINK}"
    papers = ("dflash",)
