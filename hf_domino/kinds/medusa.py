"""Medusa: heads on the target's last hidden state, each for a token one position further on (arXiv 2401.10774).

The state x of the position before the anchor is what lm_head made the anchor of. Head i = 1..K turns it into
x + SiLU(W_i x), of which the same lm_head makes the law of the i-th token behind the anchor, whatever comes between.
W_i is zero at first: a new head proposes what the target would in the anchor's place.

Shapes: B batch, C new context positions, S sequence length, N blocks per row, K heads, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_domino.kinds.backbone import ZeroLinear
from hf_domino.kinds.kind import FIFTH_LESS, HEAD_FIELDS, ONE_LAYER, READS_LM_HEADS, Kind

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig
    from hf_domino.target.view import TargetModel


class Medusa(Kind):
    """Medusa, with the published residual block for a head, and the target's lm_head for all of them."""

    title = "Medusa"
    link = "[Medusa](https://arxiv.org/abs/2401.10774)"
    papers = ("medusa",)
    way = " (a head for each, on the target's last hidden state)"
    reads_last_state = True
    why_readable = f"Medusa {READS_LM_HEADS}"
    defaults = {"block_size": 5, "num_hidden_layers": 1}
    fixed = ONE_LAYER
    unread = ("intermediate_size", "mask_token_id", *HEAD_FIELDS)
    lacks = {
        "start_from_target": "Its heads begin as the target's own guess anyway; leave it out.",
        "block_size": "Each of its heads is for one position; train a new drafter.",
        "export": "No engine reads such heads; save_pretrained writes hf_domino's own format.",
        "gradient_checkpointing": "Its heads keep hardly anything for the backward pass; leave it out.",
    }
    loss_decay = FIFTH_LESS  # arXiv 2401.10774

    @classmethod
    def context_shape(cls, config: DominoConfig) -> tuple[int, int, int]:
        """See [`Kind`]; a state's first half is stored as a key and the other as a value, to step back to any."""
        return 1, 1, config.hidden_size // 2

    def build(self) -> None:
        """See [`Kind`]."""
        width = self.config.hidden_size
        heads = (ZeroLinear(width, width, bias=False) for _ in range(self.config.block_size))
        self.drafter.heads = nn.ModuleList(heads)

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """The one that is read, as it is; see [`Kind`]."""
        (last,) = hidden_states
        return last.to(self.drafter.dtype)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Draft hidden states `[..., K, H]` of all heads from states `[..., H]`."""
        heads = self.drafter.heads[: self.config.block_size]  # fewer in a view
        return torch.stack([states + F.silu(head(states)) for head in heads], dim=-2)

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
        width, device = self.config.hidden_size, self.drafter.device
        if features is None:
            features = torch.zeros(len(anchors), 0, width, dtype=self.drafter.dtype, device=device)
        cache.begin(len(anchors), features.shape[1], counts)
        ends, reached = cache.window(2)  # the position before the anchor and, of the shortest row, no other
        halves = cache.join(0, *features[:, None].chunk(2, dim=-1), 0, reached.start)
        cache.advance()
        if not anchors.shape[1]:
            return features[:, :0]
        last = (ends - 1 - reached.start).to(device)[:, None, None, None].expand(-1, 1, 1, width // 2)
        states = torch.cat([half.gather(2, last) for half in halves], dim=-1)  # [B, 1, 1, H]
        return self.drafter(states[:, 0, 0])

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """See [`Kind`]. An anchor that is the first token of its text has no state before it: zeros stand for it."""
        if features is None:
            features = torch.zeros(len(anchors), 1, self.config.hidden_size, device=anchors.device)
            features = features.to(self.drafter.device, self.drafter.dtype)
        before = (anchors - 1).clamp(0, features.shape[1] - 1).to(features.device)
        states = features.gather(1, before[..., None].expand(-1, -1, features.shape[2]))  # [B, N, H]
        return self.forward(states * (anchors > 0)[..., None].to(states))
