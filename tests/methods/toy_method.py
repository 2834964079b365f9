"""A method of drafting as a stranger would add it: one file, and one line that registers it.

One layer of attention without positions: each proposal has a learned place, which is added to the anchor's embedding.

Shapes: B batch, C new context positions, S all context positions, N blocks, P proposals, Q block positions, H hidden
size, A heads, D head width.
"""

from __future__ import annotations

from dataclasses import field

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn

from hf_domino.methods import DominoConfig, DominoDraftModel


@strict
class ToyConfig(DominoConfig):
    """Configuration of a toy drafter, with fields of its own."""

    projector_type: str = "toy"
    num_hidden_layers: int = 1
    toy_scale: float | int = 1.0
    toy_notes: list[str] = field(default_factory=list)

    title = "Toy"
    defaults = {"block_size": 5, "num_hidden_layers": 1}
    fixed = {"num_hidden_layers": 1, "shift_label": True}
    unread = ("intermediate_size", "mask_token_id")
    lacks = {"export": "No other project knows it.", "start_from_target": "Its layer has other weights."}

    def check(self) -> None:
        super().check()
        if not self.toy_scale > 0:
            raise ValueError(f"toy_scale must be above 0, got {self.toy_scale!r}: leave it out.")


class ToyModel(DominoDraftModel):
    """A toy drafter."""

    config_class = ToyConfig

    def build(self) -> None:
        config = self.config
        width, inner = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.fc = nn.Linear(config.num_captured * width, width)
        self.places = nn.Embedding(config.num_draft_tokens, width)
        self.query = nn.Linear(width, inner)
        self.key_value = nn.Linear(width, 2 * inner)
        self.out = nn.Linear(inner, width)

    def fuse_context(self, hidden_states):
        return self.fc(torch.cat(tuple(hidden_states), dim=-1).to(self.fc.weight))

    def logits(self, target, hidden):
        return self.vocabulary.logits(target, hidden)

    def store(self, new, cache):
        cache.begin(len(new.features), new.features.shape[1], new.counts)
        cache.append(0, *self.project(new.features))
        cache.advance()

    def draft(self, target, anchors, positions, new, cache, last_tokens=None):
        features = new and new.features
        block = self.block(target, anchors).flatten(1, 2)  # [B, Q, H]
        if features is None:
            features = block[:, :0]
        visible = cache.begin(len(block), features.shape[1], new and new.counts)  # [B, S]
        mask = None
        if visible is not None:
            mask = F.pad(visible, (0, block.shape[1]), value=True)[:, None, None].to(block.device)
        keys, values = cache.join(0, *self.project(torch.cat((features, block), dim=1)), block.shape[1])
        cache.advance()
        return self(block, keys, values, mask)

    def draft_blocks(self, target, input_ids, features, anchors):
        block = self.block(target, input_ids.gather(1, anchors.clamp(min=0)))  # [B, N, P, H]
        num_blocks, size = block.shape[1:3]
        own = torch.eye(num_blocks, dtype=torch.bool).repeat_interleave(size, 0).repeat_interleave(size, 1)
        mask = own.expand(len(block), -1, -1)
        read = flat = block.flatten(1, 2)
        if features is not None:
            seen = torch.arange(features.shape[1]) < anchors[..., None]  # [B, N, C]
            mask = torch.cat((seen.repeat_interleave(size, 1), mask), dim=-1)
            read = torch.cat((features, flat), dim=1)
        return self(flat, *self.project(read), mask[:, None]).unflatten(1, (num_blocks, size))

    def draft_states(self, block, keys, values, mask):
        attended = F.scaled_dot_product_attention(self.heads(self.query(block)), keys, values, attn_mask=mask)
        return block + self.out(attended.transpose(1, 2).flatten(2))

    def block(self, target, anchors):
        """What proposals are made of, `[B, N, P, H]`, behind anchors `[B, N]`."""
        embeds = target.embed(anchors, self.config.toy_scale).to(self.places.weight)
        return embeds[:, :, None] + self.places.weight

    def project(self, read):
        """Keys and values `[B, A, S, D]`."""
        return [self.heads(part) for part in self.key_value(read).chunk(2, dim=-1)]

    def heads(self, projected):
        """Split `[B, S, A * D]` into heads `[B, A, S, D]`."""
        return projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
