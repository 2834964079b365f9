"""DSpark: a Markov head corrects each draft of a DFlash block by the token before it (arXiv 2607.05147).

With e = W1[x_{k-1}] and h_k the draft hidden state, the scores of position k get W2 applied to

- vanilla: e
- gated: sigmoid(G [h_k ; e] + b) * e
- rnn: tanh(o), where (g, c, o) = J [s ; e ; h_k] + b, and s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c).

The first two are of first order: their state is e alone, and nothing is carried along a block. Names are those of the
releases (`markov_head.*`, `confidence_head.proj`). The confidence head tells the chance that a draft is accepted; it is
loaded, kept and shown by `explain_round`, and no round depends on it.

Shapes: N rows or lanes, T tokens, H hidden size, R Markov rank, D tokens that are drafted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_domino.kinds.backbone import ZeroLinear
from hf_domino.kinds.block import DFLASH_LINK, Block, CorrectionHead, partial_product

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig
    from hf_domino.target.view import TargetModel


class DSpark(Block):
    """DSpark: DFlash's backbone, and a head that corrects each draft by the token before it."""

    title = "DSpark"
    link = "[DSpark](https://arxiv.org/abs/2607.05147)"
    papers = ("dspark", "dflash")
    way = f" (a {DFLASH_LINK} backbone), a Markov head corrects each by the token before it"
    head_layers = {
        f"markov_head.{name}": "weight" for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
    }  # the last two in some
    head_fields = ("markov_rank",)
    head_options = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    frozen = ("confidence_head",)
    fixed = {"pure_draft_prefix_len": 0}
    lacks = {
        "the plugin for vLLM": "vLLM runs DSpark itself, in the layout of DeepSpec or speculators.",
    }

    def build(self) -> None:
        """See [`Kind`]; the names are those of the releases."""
        super().build()
        drafter, config = self.drafter, self.config
        drafter.markov_head = HEADS[config.markov_head_type](config)
        if config.enable_confidence_head:
            drafter.confidence_head = ConfidenceHead(config)

    @property
    def head(self) -> MarkovHead:
        """See [`Kind`]."""
        return self.drafter.markov_head

    def head_parameters(self) -> list[nn.Parameter]:
        """See [`Kind`]."""
        read = self.head.table.weight
        return [weight for weight in self.head.parameters() if weight is not read]

    def confidence(self, draft_hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
        """See [`Kind`]."""
        if not self.config.enable_confidence_head:
            return None
        read = draft_hidden
        if self.config.confidence_head_with_markov:
            read = torch.cat((draft_hidden, self.head.embed(token_ids).to(draft_hidden)), dim=-1)
        return self.drafter.confidence_head.proj(read)[..., 0].float().sigmoid()


class ConfidenceHead(nn.Module):
    """The chance that a draft is accepted, of its draft hidden state and the embedding of the token before it."""

    def __init__(self, config: DominoConfig):
        super().__init__()
        width = config.hidden_size + config.confidence_head_with_markov * config.markov_rank
        self.proj = nn.Linear(width, 1)


class MarkovHead(nn.Module, CorrectionHead):
    """The vanilla head: a table of each token's embedding, which W2 reads as it is."""

    def __init__(self, config: DominoConfig):
        super().__init__()
        self.rank = self.state_size = config.markov_rank
        self.hidden_size = config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = ZeroLinear(self.rank, config.draft_width, bias=False)

    @property
    def up(self) -> nn.Linear:
        """See [`CorrectionHead`]."""
        return self.markov_w2

    @property
    def table(self) -> nn.Embedding:
        """The embeddings of tokens that are read."""
        return self.markov_w1

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `[..., R]` of tokens, on the head's device."""
        return self.table(token_ids.to(self.table.weight.device))

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]; it does not look at them."""
        return draft_hidden[..., :0]

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        """See [`CorrectionHead`]; of tokens before, nothing is kept."""
        return self.embed(token_ids)

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return self.embed(token_ids)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return states


class GatedMarkovHead(MarkovHead):
    """The embedding of the token before, each number as far as a gate of it and the draft hidden state lets pass."""

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(self.hidden_size + self.rank, self.rank)

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return partial_product(self.gate_proj, draft_hidden, biased=True)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return (part + partial_product(self.gate_proj, states, self.hidden_size)).sigmoid() * states


class RecurrentMarkovHead(MarkovHead):
    """A state along the block, s, beside which that of the interface holds o: what W2 reads at the position."""

    read = CorrectionHead.read  # from the start, token by token

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        self.joint_proj, self.state_size = nn.Linear(2 * self.rank + self.hidden_size, 3 * self.rank), 2 * self.rank

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return partial_product(self.joint_proj, draft_hidden, 2 * self.rank, biased=True)

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        embeds = self.embed(token_ids)
        before = states[..., : self.rank]
        joint = part + partial_product(self.joint_proj, torch.cat((before, embeds), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return torch.cat((kept * before + (1 - kept) * candidate.tanh(), output), dim=-1)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See [`CorrectionHead`]."""
        return states[..., self.rank :].tanh()


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}  # by `markov_head_type`
