"""EAGLE-3: one layer that reads captured states and the tokens after them, then its own drafts (arXiv 2503.01840).

The entry of position t combines the fused state of t with token t + 1. The layer's attention reads [norm(embedding);
norm(state)] of the entry and of all entries before it. The layer adds its output to the state, which gives the draft
hidden state; a norm and lm_head turn this into the distribution of token t + 2. After the anchor, draft hidden states
replace the target's: the entry of a draft combines the hidden state that it was drawn from with its token. A branch
sees the context and its own drafts.

Tensors have the names that speculators and vLLM use; those of other releases are renamed when they are loaded.

Shapes: B batch, C new context positions, S stored positions, E entries to compute, L branches, N drafts of all
branches so far or anchors of a sequence, K drafts after an anchor, A heads, D head width, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods.backbone import RotaryTable, rotate
from hf_domino.methods.context import NewContext
from hf_domino.methods.entries import EntryCache
from hf_domino.methods.modeling import DominoDraftModel
from hf_domino.methods.scorer import Drafted, Scorer, along
from hf_domino.methods.side_by_side import block_positions, gather_positions

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel

# Takes queries, keys and values `[B, A, E, D]` and returns the attention output `[B, A, E, D]`.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@strict
class Eagle3Config(DominoConfig):
    """Configuration of an EAGLE-3 drafter, which drafts at most `block_size` tokens.

    Args:
        norm_before_residual (`bool`, *optional*, defaults to `False`): Whether the layer adds to the normalised state.
        norm_before_fc (`bool`, *optional*, defaults to `False`): Whether one norm covers all captured states together.
        fc_norm (`bool`, *optional*, defaults to `False`): Whether each captured state has a norm of its own.
        norm_output (`bool`, *optional*, defaults to `False`): Whether the next draft reads the normalised state.
        qk_norm (`bool`, *optional*, defaults to `False`): Whether queries and keys are normalised.
        own_embeddings (`bool`, *optional*, defaults to `False`): Whether it has its own embeddings, not the target's.
        own_lm_head (`bool`, *optional*, defaults to `False`): Whether it has its own lm_head for the tokens it drafts.
        kwargs: The fields of [`DominoConfig`].
    """

    projector_type: str = "eagle3"
    num_hidden_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    own_embeddings: bool = False
    own_lm_head: bool = False

    title = "EAGLE-3"
    article = "an"
    needs_layer_ids = False
    most_captured = 3
    defaults = {"block_size": 7, "num_hidden_layers": 1}
    fixed = {"num_hidden_layers": 1, "shift_label": True, "pure_draft_prefix_len": 0}
    unread = ("mask_token_id",)
    built_with = (*DominoConfig.built_with, "norm_before_residual", "qk_norm")
    lacks = {
        "start_from_target": "Its layer reads embeddings beside states; leave it out.",
        "export": "Engines' layouts are read, not written; save_pretrained writes hf_domino's own format.",
        "gradient_checkpointing": "It has one layer; leave it out.",
        "cache_implementation='static'": "Its branches are no rounds of fixed shape yet; leave it out.",
        "explain_round": "What it drafts depends on the path; look at drafter.stats.",
    }
    loss_decay = -1 / math.log(0.8)  # draft i has the weight 0.8^i (arXiv 2503.01840)

    @classmethod
    def choose_layers(cls, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """Choose an early, a middle and a late layer, or spread them if the target is small or others are wanted."""
        ids = [1, num_target_layers // 2 - 1, num_target_layers - 4]
        if ids == sorted(set(ids)) and num_captured in (None, len(ids)):
            return ids
        return super().choose_layers(num_target_layers, num_captured)

    def follow_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.own_embeddings = "embed_tokens.weight" in shapes  # the target's are used if none are stored
        self.own_lm_head = "lm_head.weight" in shapes
        self.qk_norm = "layers.0.self_attn.q_norm.weight" in shapes

    def check(self) -> None:
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("fc_norm must be False with norm_before_fc=True, got True.")


class EntryAttention(nn.Module):
    """Attention of entries; the caller decides which entries they see."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.head_dim = config.head_dim
        width = config.hidden_size
        self.interleaved = config.rope_interleaved
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            setattr(self, name, Qwen3RMSNorm(config.head_dim, config.rms_norm_eps))

    def forward(self, read: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """Attend from the layer's input for entries, `[B, E, 2H]`; returns `[B, E, H]`."""
        queries = rotate(self.q_norm(self._heads(self.q_proj(read))), *rotary, self.interleaved)
        attended = attend(queries, *self.project(read, rotary))
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def project(self, read: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute only keys and values, `[B, A, E, D]`."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(read))), *rotary, self.interleaved)
        return keys, self._heads(self.v_proj(read))

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [B, A, E, D]


class EntryLayer(nn.Module):
    """The layer: attention over entries and an MLP, each added to the entries' states."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.self_attn = EntryAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def read(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Build the input of attention for entries, `[B, E, 2H]`."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), dim=-1)

    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
    ) -> torch.Tensor:
        """Compute draft hidden states `[B, E, H]` of entries from their embeddings and states, both `[B, E, H]`."""
        read = self.read(embeds, states)
        if self.norm_before_residual:
            states = read[..., states.shape[-1] :]
        states = states + self.self_attn(read, rotary, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class _DraftAttention:
    """An [`Attend`] for drafts in branches, which keeps the keys and values of all drafts so far.

    Args:
        sees (`torch.Tensor`): Which of the kept positions each branch sees, `[B, L, N]` bool.
        attend (`Callable`): Computes attention from queries, keys, values and such a mask.
        kept (`tuple[torch.Tensor, ...]`): Keys and values `[B, A, N, D]` to start with, if any.
    """

    def __init__(self, sees: torch.Tensor, attend: Callable[..., torch.Tensor], kept: tuple[torch.Tensor, ...] = ()):
        self.sees = sees
        self._attend = attend
        self._kept = kept

    def __call__(self, queries: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """Attend for the next draft of each branch; it also sees itself."""
        if self._kept:
            states = tuple(torch.cat(pair, dim=2) for pair in zip(self._kept, states, strict=True))
        own = torch.eye(queries.shape[2], dtype=torch.bool, device=queries.device).expand(len(queries), -1, -1)
        self.sees = torch.cat((self.sees, own), dim=2)
        self._kept = states
        return self._attend(queries, *states, self.sees)


class Eagle3Model(DominoDraftModel):
    """An EAGLE-3 drafter, with later versions' optional norms of captured states and of the draft hidden state."""

    config_class = Eagle3Config
    config: Eagle3Config
    _no_split_modules = ["EntryLayer"]

    def build(self) -> None:
        config = self.config
        width = config.hidden_size
        count = config.num_captured
        eps = config.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Qwen3RMSNorm(width, eps=eps) for _ in range(count))
        if config.norm_before_fc:
            self.input_norm = Qwen3RMSNorm(count * width, eps=eps)
        self.fc = nn.Linear(count * width, width, bias=False)
        self.layers = nn.ModuleList([EntryLayer(config)])
        self.norm = Qwen3RMSNorm(width, eps=eps)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        if config.own_lm_head:
            self.lm_head = nn.Linear(width, config.draft_width, bias=False)
        self._rotary = RotaryTable(config)

    def new_context(self) -> EntryCache:
        return EntryCache(self.config.draft_window_size)

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(tuple(hidden_states), dim=-1).to(self.fc.weight)
        if self.config.fc_norm:
            captured = joined.chunk(len(self.fc_norm), dim=-1)
            joined = torch.cat([norm(states) for norm, states in zip(self.fc_norm, captured, strict=True)], dim=-1)
        return self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        config = self.config
        normed = hidden.to(self.device)
        normed = normed if config.norm_output else self.norm(normed)
        if config.own_lm_head:
            return self.lm_head(normed).to(hidden.device).float()
        return self.vocabulary.logits(target, normed.to(hidden.device))

    def head_parameters(self) -> list[nn.Parameter]:
        names = ("norm",) * (not self.config.norm_output) + ("lm_head",) * self.config.own_lm_head
        return [weight for name in names for weight in self.get_submodule(name).parameters()]

    def embed(self, target: TargetModel, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens `[...]` as `[..., H]`; ids outside the vocabulary, such as an image's, are clamped into it."""
        tokens = tokens.clamp(0, self.config.vocab_size - 1)
        if self.config.own_embeddings:
            embeds = self.embed_tokens(tokens.to(self.device))
        else:
            embeds = target.embed(tokens)
        return embeds.to(self.fc.weight)

    def draft_states(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Compute draft hidden states `[B, E, H]` from embeddings and states `[B, E, H]` at positions `[B, E]`."""
        layer: Any = self.layers[0]
        hidden = layer(embeds, states, self._rotary(positions), attend)
        if self.config.norm_output:
            return self.norm(hidden)
        return hidden

    def store(self, new: NewContext, cache: Any) -> None:
        # States are stored right away; entries are computed once the tokens after them exist.
        assert new.features is not None
        cache.keep(new.features, new.counts)

    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        new: NewContext | None,
        cache: Any,
        last_tokens: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        device = self.device
        if new is not None:
            self.store(new, cache)
        assert last_tokens is not None
        states, counts = cache.begin_missing_entries()  # [B, E, H]
        last = torch.tensor(counts, device=device)[:, None]  # [B, 1]
        tokens = last_tokens(states.shape[1])
        places = torch.arange(states.shape[1], device=device)
        if min(counts) < max(counts):  # move each sequence's tokens to its entries, which come first
            tokens = tokens.gather(1, (places - last).to(tokens.device) % states.shape[1])
        embeds = self.embed(target, tokens)
        hidden = self(embeds, states, positions - last + places, cache.attend)
        cache.entries.advance()
        return along(last - 1, hidden)

    def scorer(self, target: TargetModel, reads_host: bool = True) -> Scorer:
        return EntryScorer(self, target)

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        # The tokens are those of the text, but the hidden states after the anchor are the drafter's own. An anchor that
        # is the first token of its text has no state before it; zeros take its place.
        device = self.device
        count = self.config.block_size
        layer: Any = self.layers[0]
        has_context = features is not None
        if features is None:
            features = torch.zeros(len(anchors), 1, self.config.hidden_size, device=device, dtype=self.dtype)
        length = features.shape[1]
        behind = input_ids[:, 1 : length + 1]
        behind = F.pad(behind, (0, length - behind.shape[1]))
        read = layer.read(self.embed(target, behind), features)
        columns = torch.arange(length, device=device)
        ends = (anchors - 1).to(device)
        kept = layer.self_attn.project(read, self._rotary(columns[None]))
        # Each anchor sees the entries before position anchor - 1. The entry there is the first of the anchor's own
        # entries and counts towards the window.
        behind = ends[..., None] - columns
        is_near = behind < (self.config.draft_window_size or length)
        attend = _DraftAttention((behind > 0) & is_near & has_context, _attend, kept)
        first = ends.clamp(0, length - 1)[..., None]
        states = features.gather(1, first.expand(-1, -1, features.shape[2])) * (ends >= 0)[..., None].to(features)
        tokens = gather_positions(input_ids, block_positions(anchors, count))  # [B, N, K]
        hidden = []
        for depth in range(count):
            embeds = self.embed(target, tokens[..., depth])
            states = self.draft_states(embeds, states, (ends + depth).clamp(min=0), attend)
            hidden.append(states)
        return torch.stack(hidden, dim=2)


class EntryScorer(Scorer):
    """Scores the drafts after each token by drafting again; keys and values of branches are never kept as context."""

    is_parallel = False
    num_passes = None

    def begin(self, drafted: Drafted) -> None:
        super().begin(drafted)
        hidden = drafted.hidden
        self._hidden = hidden  # [B, L, H]
        self._positions = drafted.positions
        nothing = torch.zeros(len(hidden), 1, 0, dtype=torch.bool, device=hidden.device)
        self._drafts = _DraftAttention(nothing, drafted.cache.attend_drafts)

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        super().advance(tokens, parents)
        assert self._positions is not None
        drafts = self._drafts
        states = self._hidden
        if parents is not None:
            states = along(parents, states)
            drafts.sees = along(parents, drafts.sees)
        embeds = self.drafter.embed(self.target, tokens)
        self._hidden = self.drafter(embeds, states, self._positions.expand(-1, tokens.shape[1]), drafts)
        self._positions = self._positions + 1
        self.logits = self.drafter.logits(self.target, self._hidden.flatten(0, 1)[:, None].to(tokens.device))


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """Compute attention `[B, A, E, D]` under a mask `[B, E, S]` bool."""
    # Under autocast, queries and keys can have another dtype than values.
    queries = queries.to(values.dtype)
    keys = keys.to(values.dtype)
    return F.scaled_dot_product_attention(queries, keys, values, sees[:, None], enable_gqa=True)
