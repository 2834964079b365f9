"""DSpark: a Markov head corrects each draft of a DFlash block by the token before it (arXiv 2607.05147).

Let e = W1[x_{k-1}] be the embedding of the previous token and h_k the draft hidden state. The head adds to the scores
of position k the product of W2 and

- vanilla: e
- gated: sigmoid(G [h_k ; e] + b) * e
- rnn: tanh(o), where (g, c, o) = J [s ; e ; h_k] + b, and s becomes sigmoid(g) s + (1 - sigmoid(g)) tanh(c).

The first two are of first order: their state is e alone, and nothing is carried along a block. Tensors have the names
of the released checkpoints (`markov_head.*`, `confidence_head.proj`). The confidence head predicts how likely the
target is to accept a draft. It is loaded, saved and shown by `explain_round`, but decoding does not use it.

Shapes: N sequences or branches, T tokens, H hidden size, R Markov rank, D tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import WIDTH, check_choice
from hf_domino.configuration.from_target import rank_for
from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.block import BlockModel
from hf_domino.methods.block_config import BlockConfig
from hf_domino.methods.correction import CorrectionHead, partial_product

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel


CONFIDENCE = "confidence_head.proj.weight"


@strict
class DSparkConfig(BlockConfig):
    """Configuration of a DSpark drafter.

    Args:
        markov_rank (`int`, *optional*, defaults to 256): Rank of the Markov head.
        markov_head_type (`str`, *optional*, defaults to `"vanilla"`): `"vanilla"`, `"gated"` (by the draft hidden
            state) or `"rnn"` (with a state along the block).
        enable_confidence_head (`bool`, *optional*, defaults to `False`): Whether the drafter has a confidence head.
            [`explain_round`] shows its predictions; hf_domino does not train it.
        confidence_head_with_markov (`bool`, *optional*, defaults to `True`): Whether the confidence head also reads the
            embedding of the previous token.
        kwargs: The fields of [`BlockConfig`].
    """

    projector_type: str = "dspark"
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True

    title = "DSpark"
    head_layers = {
        f"markov_head.{name}": "weight" for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
    }  # the last two exist only in gated and rnn heads
    frozen = ("confidence_head",)
    fixed = {"pure_draft_prefix_len": 0}
    built_with = (*BlockConfig.built_with, "markov_head_type")
    ranges = BlockConfig.ranges | {"markov_rank": WIDTH}

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        return super().sizes_for(hidden_size) | {"markov_rank": rank_for(hidden_size)}

    def follow_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        width = shapes[CONFIDENCE][-1] if CONFIDENCE in shapes else None
        self.enable_confidence_head = width is not None
        self.confidence_head_with_markov = width != self.hidden_size

    def check(self) -> None:
        super().check()
        check_choice(self, "markov_head_type", tuple(HEADS))
        if self.markov_head_type == "rnn" and not self.shift_label:
            remedy = "Where its state begins is not the same in all projects then; vanilla and gated heads are read."
            raise invalid_argument("shift_label with markov_head_type='rnn'", True, False, remedy)


class ConfidenceHead(nn.Module):
    """Predicts acceptance of a draft from its draft hidden state and, optionally, the previous token's embedding."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        width = config.hidden_size + config.confidence_head_with_markov * config.markov_rank
        self.proj = nn.Linear(width, 1)


class MarkovHead(nn.Module, CorrectionHead):
    """The vanilla head: W2 reads the embedding of the previous token directly."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.rank = self.state_size = config.markov_rank
        self.hidden_size = config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = ZeroLinear(self.rank, config.draft_width, bias=False)

    @property
    def up(self) -> nn.Linear:
        return self.markov_w2

    @property
    def table(self) -> nn.Embedding:
        """The embedding table of the previous tokens."""
        return self.markov_w1

    def trained_parameters(self) -> list[nn.Parameter]:
        """All weights of the head except the embedding table."""
        return [weight for weight in self.parameters() if weight is not self.table.weight]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens `[...]` as `[..., R]` on the head's device."""
        return self.table(token_ids.to(self.table.weight.device))

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        return draft_hidden[..., :0]

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        return self.embed(token_ids)

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        return self.embed(token_ids)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states


class GatedMarkovHead(MarkovHead):
    """The gated head: a gate computed from draft hidden state and embedding scales the previous token's embedding."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(self.hidden_size + self.rank, self.rank)

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        return partial_product(self.gate_proj, draft_hidden, biased=True)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return partial_product(self.gate_proj, states, self.hidden_size, added=part).sigmoid() * states


class RecurrentMarkovHead(MarkovHead):
    """The recurrent head: its state holds s, which is carried along the block, and o, which gives the input of W2."""

    read = CorrectionHead.read  # undo MarkovHead's shortcut: this state depends on all earlier tokens

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + self.hidden_size, 3 * self.rank)
        self.state_size = 2 * self.rank

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        return partial_product(self.joint_proj, draft_hidden, 2 * self.rank, biased=True)

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        embeds = self.embed(token_ids)
        before = states[..., : self.rank]
        joint = partial_product(self.joint_proj, torch.cat((before, embeds), dim=-1), added=part)
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return torch.cat((kept * before + (1 - kept) * candidate.tanh(), output), dim=-1)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states[..., self.rank :].tanh()


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}  # by `markov_head_type`


class DSparkModel(BlockModel):
    """A DSpark drafter: DFlash's backbone, and a head that corrects each draft by the token before it."""

    config_class = DSparkConfig
    config: DSparkConfig
    markov_head: MarkovHead

    def build(self) -> None:
        super().build()
        self.markov_head = HEADS[self.config.markov_head_type](self.config)
        if self.config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(self.config)

    @property
    def head(self) -> MarkovHead:
        return self.markov_head

    def head_parameters(self) -> list[nn.Parameter]:
        return self.head.trained_parameters()

    def confidence(self, draft_hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
        if not self.config.enable_confidence_head:
            return None
        read = draft_hidden
        if self.config.confidence_head_with_markov:
            read = torch.cat((draft_hidden, self.head.embed(token_ids).to(draft_hidden)), dim=-1)
        return self.confidence_head.proj(read)[..., 0].float().sigmoid()
