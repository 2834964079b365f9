"""DFlash 2: a selector chooses among the likeliest tokens of each position, by the token before it.

With h the draft hidden state, the `selector_top_k` likeliest tokens of a position by its base logits
get the score base[b] + <A[a] * (P h), B[b]> behind a token a; others are not drafted. The backbone has
convolutions. Names are those of z-lab's files (`candidate_selector.*`), in which the matrices A and B,
the codebooks, have no `.weight` behind their names.

Shapes: D tokens that are drafted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.block import DFLASH_LINK, Block
from hf_domino.methods.dspark import DSpark, MarkovHead

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

# Of what is not among the candidates: no chance beside one of them, and a law where all are forbidden.
LEFT_OUT = -1e9


class DFlash2(Block):
    """DFlash 2: a backbone with convolutions, and a selector among the likeliest tokens."""

    title = "DFlash 2"
    link = "[DFlash 2](https://github.com/z-lab/dflash)"
    papers = ("dflash",)
    way = f" (a {DFLASH_LINK} backbone), a selector reads the one before and chooses each"
    head_layers = {
        f"candidate_selector.{name}": "weight"
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection")
    }
    head_fields = ("selector_rank", "selector_top_k")
    defaults = {"conv_kernel_size": 2, "draft_pool_size": 16}
    fixed = DSpark.fixed
    head_parameters = DSpark.head_parameters
    lacks = DSpark.lacks | {"the plugin for vLLM": "vLLM runs DFlash 2 itself, in z-lab's layout."}

    def build(self) -> None:
        """See [`Kind`]; the names are those of the releases."""
        super().build()
        self.drafter.candidate_selector = CandidateSelector(self.config)

    @property
    def head(self) -> CandidateSelector:
        """See [`Kind`]."""
        return self.drafter.candidate_selector


class CandidateSelector(MarkovHead):
    """The embedding of the token before, each number times one of the draft hidden state."""

    def __init__(self, config: DominoConfig):
        nn.Module.__init__(self)
        self.top_k, rank = config.selector_top_k, config.selector_rank
        self.state_size = rank
        self.predecessor_codebook = nn.Embedding(config.vocab_size, rank)
        self.successor_codebook = ZeroLinear(rank, config.draft_width, bias=False)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    @property
    def up(self) -> nn.Linear:
        """See [`CorrectionHead`]."""
        return self.successor_codebook

    @property
    def table(self) -> nn.Embedding:
        """See [`MarkovHead`]."""
        return self.predecessor_codebook

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return self.hidden_projection(draft_hidden)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return part * states

    def narrow(self, base_logits: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]; the candidates' are as they are."""
        kept = base_logits.topk(min(self.top_k, base_logits.shape[-1]), dim=-1)
        return torch.full_like(base_logits, LEFT_OUT).scatter(-1, kept.indices, kept.values)
