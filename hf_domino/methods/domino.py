"""Domino: a GRU reads the chosen tokens, and a low-rank projection onto the vocabulary corrects the backbone's logits.

Domino (arXiv 2605.29707): corrected_k = base_k + W2 SiLU(W1 [z_k ; state_k]). The columns of W1 are split into a part
for the draft hidden state, which is multiplied once per block, and a part for the prefix state, which is multiplied
once per token. Tensors have the names of the released checkpoints (`prefix_gru.*`, `embed_proj.0`, `embed_proj.2`).

Shapes: B batch, T tokens, H hidden size, G width of the prefix state, R low rank, M candidates, D tokens that can be
drafted (one column each): all of the target's or fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn

import domino_kernels
from domino_kernels.dispatch import FLOATS
from domino_kernels.reference import step_from_products
from hf_domino.configuration.checks import WIDTH
from hf_domino.configuration.from_target import rank_for
from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.block import BlockModel
from hf_domino.methods.block_config import BlockConfig
from hf_domino.methods.correction import CorrectionHead, partial_product

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel


@strict
class DominoMethodConfig(BlockConfig):
    """Configuration of a Domino drafter.

    Args:
        emb_dim (`int`, *optional*, defaults to 256): Low rank of the correction head.
        gru_hidden_dim (`int`, *optional*, defaults to 1024): Width of the prefix state.
        kwargs: The fields of [`BlockConfig`].
    """

    projector_type: str = "domino"
    emb_dim: int = 256
    gru_hidden_dim: int = 1024

    title = "Domino"
    head_layers = {"prefix_gru": "weight_hh_l0", "embed_proj.0": "weight", "embed_proj.2": "weight"}
    defaults = {"pure_draft_prefix_len": 1}  # SGLang requires it, and it costs nothing: model_cards/workshop/study
    ranges = BlockConfig.ranges | {"emb_dim": WIDTH, "gru_hidden_dim": WIDTH}

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        own = {"emb_dim": rank_for(hidden_size), "gru_hidden_dim": max(32, min(1024, hidden_size // 2))}
        return super().sizes_for(hidden_size) | own


class PrefixGRU(nn.Module):
    """A one-layer bias-free GRU that reads the anchor and then each chosen token (gate order r, z, n).

    Args:
        hidden_size (`int`): Width of token embeddings (H).
        state_size (`int`): Width of the prefix state (G).
    """

    def __init__(self, hidden_size: int, state_size: int):
        super().__init__()
        self.hidden_size = state_size
        bound = state_size**-0.5
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * state_size, hidden_size).uniform_(-bound, bound))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * state_size, state_size).uniform_(-bound, bound))

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """The zero prefix state `[B, G]` that every block starts from."""
        return self.weight_hh_l0.new_zeros(batch_size, self.hidden_size)

    def forward(self, token_embeds: torch.Tensor) -> torch.Tensor:
        """Read token embeddings `[B, T, H]` from the start; returns the prefix state after each token, `[B, T, G]`."""
        return _GRUFunction.apply(self.project_inputs(token_embeds), self.weight_hh_l0)

    def step(self, token_embeds: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Read one token embedding `[B, H]` in prefix state `[B, G]`; returns the next prefix state `[B, G]`."""
        if domino_kernels.runs_triton(state):
            return domino_kernels.gru_step(token_embeds, state, self.weight_ih_l0, self.weight_hh_l0)
        return torch.gru_cell(token_embeds, state, self.weight_ih_l0, self.weight_hh_l0)

    def project_inputs(self, token_embeds: torch.Tensor) -> torch.Tensor:
        """Compute the share of token embeddings `[..., H]` in the gates, `[..., 3G]`; it needs no prefix state."""
        return F.linear(token_embeds, self.weight_ih_l0)

    def advance(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Finish a [`~PrefixGRU.step`] from projected inputs `[B, 3G]` and prefix state `[B, G]`."""
        return step_from_products(inputs, state, self.weight_hh_l0)


class _GRUFunction(torch.autograd.Function):
    """Runs a GRU from the zero state over projected inputs, in a few simple operations that can be compiled.

    Matrix products use the dtype of the inputs, which autocast makes narrow; states and all else use the weight's.
    """

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the state after each token, `[B, T, G]`, from inputs `[B, T, 3G]` and the weight `[3G, G]`."""
        narrow = weight.to(inputs.dtype)
        width = weight.shape[1]
        states = [weight.new_zeros(len(inputs), width)]
        kept = []
        for of_token in inputs.to(weight.dtype).unbind(1):
            gates, new = of_token.split((2 * width, width), dim=1)
            state_gates, state_new = F.linear(states[-1].to(narrow.dtype), narrow).split((2 * width, width), dim=1)
            opened = (gates + state_gates).sigmoid_()
            reset, update = opened.chunk(2, dim=1)
            candidate = torch.addcmul(new, reset, state_new.to(new.dtype)).tanh_()
            states.append(torch.lerp(candidate, states[-1], update))
            kept += [opened, candidate, state_new]
        ctx.save_for_backward(narrow, *states, *kept)
        return torch.stack(states[1:], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Go from the last token to the first; one product over all tokens gives the weight's gradient."""
        narrow, *saved = ctx.saved_tensors
        length = gradient.shape[1]
        states = saved[: length + 1]
        kept = saved[length + 1 :]
        of_inputs = []
        of_products = []
        grad_state = torch.zeros_like(states[0])
        for index in reversed(range(length)):
            opened, candidate, state_new = kept[3 * index : 3 * index + 3]
            reset, update = opened.chunk(2, dim=1)
            grad_state = grad_state + gradient[:, index]
            grad_new = torch.ops.aten.tanh_backward(grad_state - grad_state * update, candidate)
            of_gates = torch.cat((grad_new * state_new, grad_state * (states[index] - candidate)), dim=1)
            of_gates = torch.ops.aten.sigmoid_backward(of_gates, opened)
            of_inputs.append(torch.cat((of_gates, grad_new), dim=1))
            of_products.append(torch.cat((of_gates, grad_new * reset), dim=1).to(narrow.dtype))
            grad_state = torch.addcmul(of_products[-1] @ narrow, grad_state, update)
        before = torch.cat(states[:-1][::-1]).to(narrow.dtype)
        of_weight = (torch.cat(of_products).mT @ before).to(states[0].dtype)
        return torch.stack(of_inputs[::-1], dim=1).to(narrow.dtype), of_weight


def correction_projection(hidden_size: int, state_size: int, rank: int, width: int) -> nn.Sequential:
    """Create W2 SiLU(W1 [z ; state]) for `width` tokens that can be drafted (D); a fresh one corrects nothing."""
    down = nn.Linear(hidden_size + state_size, rank, bias=False)
    return nn.Sequential(down, nn.SiLU(), ZeroLinear(rank, width, bias=False))


class DominoHead(CorrectionHead):
    """Domino's head: a prefix state that reads every token from the anchor on, and a low-rank projection.

    This is a mixin: a model that inherits from it holds the head's modules, named as in the released checkpoints.
    """

    prefix_gru: PrefixGRU
    embed_proj: nn.Sequential

    def build_head(self, config: DominoMethodConfig, width: int) -> None:
        """Create the head's modules for `width` tokens that can be drafted (D)."""
        sizes = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = PrefixGRU(*sizes)
        self.embed_proj = correction_projection(*sizes, config.emb_dim, width)

    @property
    def gru(self) -> PrefixGRU:
        """The GRU, under the name that decoding uses."""
        return self.prefix_gru

    # The layers of the projection are read by name, because PEFT's `modules_to_save` wraps it in a module without
    # indices, which passes names on.
    @property
    def _down(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.embed_proj, "0"))

    @property
    def up(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.embed_proj, "2"))

    def initial_state(self, num_rows: int) -> torch.Tensor:
        return self.prefix_gru.initial_state(num_rows)

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        return partial_product(self._down, draft_hidden)

    def project_state(self, states: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the share of prefix states `[..., G]` in the input of SiLU, `[..., R]`, and add the other part."""
        first = self._down.weight.shape[1] - states.shape[-1]
        return partial_product(self._down, states, first, added=added)

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        return self.prefix_gru.step(target.embed(token_ids).to(states), states)

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        return self.prefix_gru(target.embed(token_ids).to(draft_hidden.device, self.up.weight.dtype))

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return F.silu(self.project_state(states, part))

    def fits_kernels(self, device: torch.device) -> bool:
        weight = self.prefix_gru.weight_hh_l0
        return weight.dtype in FLOATS and weight.device == device


class DominoMethodModel(BlockModel, DominoHead):
    """A Domino drafter: DFlash's backbone, and a head that corrects its drafts token by token."""

    config_class = DominoMethodConfig
    config: DominoMethodConfig

    def build(self) -> None:
        super().build()
        self.build_head(self.config, self.config.draft_width)

    @property
    def head(self) -> CorrectionHead:
        return self

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.embed_proj.parameters())
