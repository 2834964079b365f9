"""The interface of correction heads, which correct a block's base logits by the tokens chosen so far.

Shapes: N sequences or branches, T tokens, H hidden size, G width of a state, R width of what W2 reads, M candidates, D
tokens that are drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from hf_domino.target.view import TargetModel


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
    if biased or bias is None:
        return product
    return product - bias


class CorrectionHead(ABC):
    """A correction head, which says how the scores of a position depend on the tokens chosen before it.

    Most have one form: corrected_k = base_k + W2 activate(part_k, state_k). The part is of the draft hidden state and
    is made once for the block; the state has read the tokens before, and is zero before the anchor. What a head makes
    otherwise of what it activates, its `correct` says.
    """

    state_size: int  # G
    num_passes: int | None = None  # over a chain, of a head that reads the tokens of one all at once
    # Of heads whose input products can be kept by token, and which kernels know.
    gru: Any = None
    project_state: Any = None

    @property
    @abstractmethod
    def up(self) -> nn.Linear:
        """The layer of W2, `[D, R]`, or another that is zero while the head corrects nothing."""

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

    def rows(self, target: TargetModel, columns: torch.Tensor) -> torch.Tensor:
        """What `correct` reads of some tokens by their columns `[..., M]`: the rows of W2, `[..., M, R]`."""
        return F.embedding(columns.to(self.up.weight.device), self.up.weight)

    def correct(
        self, target: TargetModel, base_logits: torch.Tensor, activated: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Correct base logits `[..., D]` by what W2 reads `[..., R]`; with rows `[N, M, R]` those of M tokens alone."""
        if rows is None:
            return base_logits + self.up(activated).to(base_logits)
        return base_logits + (activated @ rows.mT).to(base_logits)
