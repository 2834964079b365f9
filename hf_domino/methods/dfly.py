"""DFly: before lm_head, a gated MLP corrects each draft hidden state by the previous token (arXiv 2607.25852).

Let h be the draft hidden state of a position and e the embedding of the token before it. lm_head scores the position
from h + D(SiLU(G x) * U x), where x = [norm h ; norm e]. A fresh D is zero. The correction is of first order: its state
is e alone. Each layer of the backbone has its own fusion of the captured layers. Tensors have the names of the released
checkpoints (`hidden_correction.*`).

Shapes: N sequences or branches, T tokens, H hidden size, I width of the MLP, M candidates, D tokens that can be
drafted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_domino.configuration.checks import WIDTH, check_range
from hf_domino.methods.backbone import ZeroLinear
from hf_domino.methods.block import BlockModel
from hf_domino.methods.block_config import BlockConfig
from hf_domino.methods.correction import CorrectionHead, partial_product

if TYPE_CHECKING:
    from hf_domino.targets.view import TargetModel


@strict
class DFlyConfig(BlockConfig):
    """Configuration of a DFly drafter.

    Args:
        hidden_correction_intermediate_size (`int`, *optional*): Width of the correction MLP; None for `hidden_size`.
        kwargs: The fields of [`BlockConfig`].
    """

    projector_type: str = "dfly"
    hidden_correction_intermediate_size: int | None = None

    title = "DFly"
    head_layers = {f"hidden_correction.{name}_proj": "weight" for name in ("gate", "up", "down")}
    defaults = {"layer_fusion": True}
    fixed = {"pure_draft_prefix_len": 0}
    lacks = {"export": "No released engine runs DFly."}

    @property
    def correction_width(self) -> int:
        """Width of the correction MLP."""
        return self.hidden_correction_intermediate_size or self.hidden_size

    def check(self) -> None:
        super().check()
        if (width := self.hidden_correction_intermediate_size) is not None:
            check_range("hidden_correction_intermediate_size", width, *WIDTH, "or None")


class HiddenCorrection(nn.Module):
    """The correction MLP; it reads a draft hidden state and a token embedding, each with its own norm."""

    def __init__(self, config: DFlyConfig):
        super().__init__()
        size = config.hidden_size
        self.hidden_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.embed_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_proj = nn.Linear(2 * size, config.correction_width, bias=False)
        self.up_proj = nn.Linear(2 * size, config.correction_width, bias=False)
        self.down_proj = ZeroLinear(config.correction_width, size, bias=False)

    def project(self, normed: torch.Tensor, first: int) -> torch.Tensor:
        """Compute the share `[..., 2I]` of one normalised input `[..., H]` in the gate and up projections.

        Args:
            normed (`torch.Tensor`): The input, `[..., H]`.
            first (`int`): Column at which it begins: 0 for the hidden state, H for the embedding.
        """
        return torch.cat([partial_product(layer, normed, first) for layer in (self.gate_proj, self.up_proj)], dim=-1)


class DFlyModel(BlockModel, CorrectionHead):
    """A DFly drafter: a backbone with fused layers, and an MLP that corrects its states by the previous token."""

    config_class = DFlyConfig
    config: DFlyConfig
    hidden_correction: HiddenCorrection

    def build(self) -> None:
        super().build()
        self.state_size = self.config.hidden_size
        self.hidden_correction = HiddenCorrection(self.config)

    @property
    def head(self) -> CorrectionHead:
        return self

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.hidden_correction.parameters())

    @property
    def up(self) -> nn.Linear:
        return self.hidden_correction.down_proj

    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Return the draft hidden states, followed by their share in the MLP's projections."""
        normed = self.hidden_correction.hidden_norm(draft_hidden)
        return torch.cat((draft_hidden, self.hidden_correction.project(normed, 0)), dim=-1)

    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        return self.embed(target, token_ids).to(states)

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        return self.embed(target, token_ids).to(draft_hidden)

    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Compute the corrected draft hidden states `[..., H]`."""
        size = self.config.hidden_size
        own = self.hidden_correction.project(self.hidden_correction.embed_norm(states), size)
        gate, up = (part[..., size:] + own).chunk(2, dim=-1)
        return part[..., :size] + self.hidden_correction.down_proj(F.silu(gate) * up)

    def rows(self, target: TargetModel, columns: torch.Tensor) -> torch.Tensor:
        """Select rows of lm_head; if lm_head cannot be read or has biases, return the columns unchanged."""
        lm_head = target.readable_head
        if lm_head is None or lm_head.bias is not None:
            return columns
        return F.embedding(self.vocabulary.ids(columns).to(lm_head.weight.device), lm_head.weight)

    def correct(
        self, target: TargetModel, base_logits: torch.Tensor, activated: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        activated = activated.to(base_logits.device)
        if rows is not None and rows.is_floating_point():
            logits = target.logits(activated, partial(torch.matmul, other=rows.mT), self.scaling)
        else:
            logits = self.logits(target, activated)
            if rows is not None:
                logits = logits.gather(-1, rows[..., None, :].expand(*logits.shape[:-1], -1))
        return logits.masked_fill(base_logits.isneginf(), -torch.inf)  # forbidden tokens stay forbidden
