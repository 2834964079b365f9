"""DFlash 2: a selector chooses among the most likely tokens of each position, depending on the token before it.

Let h be the draft hidden state of a position and a the token before it. Each token b among the `selector_top_k` with
the highest base logits gets the score base[b] + <A[a] * (P h), B[b]>. No other token is drafted. The backbone has
convolutions. Tensors have the names of z-lab's checkpoints (`candidate_selector.*`), except that there the matrices A
and B, the codebooks, are stored without the suffix `.weight`.

Shapes: D tokens that can be drafted.
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

# Logit of a token that is not a candidate. It has no chance against a candidate, but if every candidate is forbidden,
# the scores still form a distribution, which they would not with -inf.
LEFT_OUT = -1e9


@strict
class DFlash2Config(BlockConfig):
    """Configuration of a DFlash 2 drafter.

    Args:
        selector_rank (`int`, *optional*, defaults to 256): Rank of the selector.
        selector_top_k (`int`, *optional*, defaults to 16): How many of the most likely tokens it chooses among.
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
    """The selector: the embedding of the previous token times the projected draft hidden state, element by element."""

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
    """A DFlash 2 drafter: a backbone with convolutions, and a selector among the most likely tokens."""

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
