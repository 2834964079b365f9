"""DFlash 2: a selector chooses among the likeliest tokens of each position, by the token before it.

With h the draft hidden state, the `selector_top_k` likeliest tokens of a position by its base logits
get the score base[b] + <A[a] * (P h), B[b]> behind a token a; others are not drafted. The backbone has
convolutions. Names are those of z-lab's files (`candidate_selector.*`), in which the matrices A and B,
the codebooks, have no `.weight` behind their names.

Shapes: D tokens that are drafted.
"""

from __future__ import annotations

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from hf_domino.configuration.checks import MOST_DRAFTED, WIDTH
from hf_domino.configuration.from_target import rank_for
from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.block import BlockModel
from hf_domino.methods.block_config import BlockConfig
from hf_domino.methods.dspark import MarkovHead

# Of what is not among the candidates: no chance beside one of them, and a distribution where all are forbidden.
LEFT_OUT = -1e9


@strict
class DFlash2Config(BlockConfig):
    """Configuration of a DFlash 2 drafter.

    Args:
        selector_rank (`int`, *optional*, defaults to 256): Rank of the selector.
        selector_top_k (`int`, *optional*, defaults to 16): Likeliest tokens that it chooses among.
        kwargs: The fields of [`BlockConfig`].
    """

    projector_type: str = "dflash2"
    selector_rank: int = 256
    selector_top_k: int = 16

    title = "DFlash 2"
    head_layers = {
        f"candidate_selector.{name}": "weight"
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection")
    }
    defaults = {"conv_kernel_size": 2, "draft_pool_size": 16}
    fixed = {"pure_draft_prefix_len": 0}
    built_with = (*BlockConfig.built_with, "selector_top_k")
    ranges = BlockConfig.ranges | {"selector_rank": WIDTH, "selector_top_k": (1, MOST_DRAFTED)}

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        return super().sizes_for(hidden_size) | {"selector_rank": rank_for(hidden_size)}


class CandidateSelector(MarkovHead):
    """The embedding of the token before, each number times one of the draft hidden state."""

    def __init__(self, config: DFlash2Config):
        nn.Module.__init__(self)
        self.top_k = config.selector_top_k
        rank = config.selector_rank
        self.state_size = rank
        self.predecessor_codebook = nn.Embedding(config.vocab_size, rank)
        self.successor_codebook = ZeroLinear(rank, config.draft_width, bias=False)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    @property
    def up(self) -> nn.Linear:
        return self.successor_codebook

    @property
    def table(self) -> nn.Embedding:
        return self.predecessor_codebook

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_projection(draft_hidden)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return part * states

    def narrow(self, base_logits: torch.Tensor) -> torch.Tensor:
        kept = base_logits.topk(min(self.top_k, base_logits.shape[-1]), dim=-1)
        return torch.full_like(base_logits, LEFT_OUT).scatter(-1, kept.indices, kept.values)


class DFlash2Model(BlockModel):
    """A DFlash 2 drafter: a backbone with convolutions, and a selector among the likeliest tokens."""

    config_class = DFlash2Config
    config: DFlash2Config
    candidate_selector: CandidateSelector

    def build(self) -> None:
        super().build()
        self.candidate_selector = CandidateSelector(self.config)

    @property
    def head(self) -> CandidateSelector:
        return self.candidate_selector

    def head_parameters(self) -> list[nn.Parameter]:
        return self.head.trained_parameters()
