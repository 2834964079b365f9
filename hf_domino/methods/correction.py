"""The interface of correction heads, which correct a block's base logits according to the tokens chosen so far.

Shapes: N sequences or branches, T tokens, H hidden size, G width of a state, R width of the input of W2, M candidates,
D tokens that can be drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel


def partial_product(layer: nn.Module, values: torch.Tensor, first: int = 0, biased: bool = False) -> torch.Tensor:
    """Apply a linear layer to one part of its input; the caller adds the products of the other parts.

    Args:
        layer (`nn.Module`): A linear layer, or PEFT's wrapper around one, whose adapters are applied, too.
        values (`torch.Tensor`): The part of the input, `[..., P]`.
        first (`int`, *optional*, defaults to 0): Column of the layer at which the part begins.
        biased (`bool`, *optional*, defaults to `False`): Whether to add the layer's bias to this part.
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
    """A correction head, which makes the scores of a position depend on the tokens chosen before it.

    Most heads compute corrected_k = base_k + W2 activate(part_k, state_k). The part comes from the draft hidden state
    and is computed once per block. The state summarises the tokens before the position and is zero before the anchor.
    A head that corrects in another way overrides `correct`.
    """

    state_size: int  # G
    num_passes: int | None = None  # for heads that read all tokens of a chain at once: passes over the chain
    # For heads with a GRU, whose input products can be cached by token and which the kernels support.
    gru: Any = None
    project_state: Any = None

    @property
    @abstractmethod
    def up(self) -> nn.Linear:
        """The layer of W2, `[D, R]`, or whichever layer is zero as long as the head corrects nothing."""

    def initial_state(self, num_rows: int) -> torch.Tensor:
        """The zero state `[N, G]` that every block starts from."""
        return self.up.weight.new_zeros(num_rows, self.state_size)

    @abstractmethod
    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Compute the part of draft hidden states `[..., H]`; its width depends on the head."""

    @abstractmethod
    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        """Read one more token per branch.

        Args:
            target (`TargetModel`): Provides the token embeddings.
            token_ids (`torch.Tensor`): The tokens to read, `[N]`.
            states (`torch.Tensor`): The states before these tokens, `[N, G]`.
            part (`torch.Tensor`): The parts of the positions after these tokens, as `project_hidden` returns them.

        Returns:
            `torch.Tensor`: The states after these tokens, `[N, G]`.
        """

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Read all tokens of a path from the start.

        Args:
            target (`TargetModel`): Provides the token embeddings.
            token_ids (`torch.Tensor`): The token before each position, `[N, T]`.
            draft_hidden (`torch.Tensor`): The draft hidden states of the positions, `[N, T, H]`.

        Returns:
            `torch.Tensor`: The state after each token, `[N, T, G]`.
        """
        states = [self.initial_state(len(token_ids))]
        for tokens, part in zip(token_ids.unbind(1), self.project_hidden(draft_hidden).unbind(1), strict=True):
            states.append(self.step(target, tokens, states[-1], part))
        return torch.stack(states[1:], dim=1)

    @abstractmethod
    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Compute the input of W2 `[..., R]` from the parts and the states `[..., G]` of positions."""

    def narrow(self, base_logits: torch.Tensor) -> torch.Tensor:
        """Mask the base logits `[..., D]` of tokens that the head does not consider; by default, it considers all."""
        return base_logits

    def fits_kernels(self, device: torch.device) -> bool:
        """Whether the fused kernels support this head on a device."""
        return False

    def rows(self, target: TargetModel, columns: torch.Tensor) -> torch.Tensor:
        """Select what `correct` needs for some columns `[..., M]` only: their rows of W2, `[..., M, R]`."""
        return F.embedding(columns.to(self.up.weight.device), self.up.weight)

    def correct(
        self, target: TargetModel, base_logits: torch.Tensor, activated: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Correct base logits `[..., D]` by the input of W2 `[..., R]`; given rows `[N, M, R]`, those of M tokens."""
        if rows is None:
            return base_logits + self.up(activated).to(base_logits)
        return base_logits + (activated @ rows.mT).to(base_logits)
