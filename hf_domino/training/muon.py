"""Muon for the weight matrices, AdamW for embeddings, output projections and norms, as one optimizer.

Orthogonalised updates (Muon, K. Jordan, 2024) bring small models through their first plateau in about a third of
AdamW's steps.

Shapes: N matrices of one shape, R rows, C columns, R at most C.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

RMS_OF_ADAMW = 0.2  # of its updates, which torch's "match_rms_adamw" takes over


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with all matrices of a shape at once, where it is launches that cost: on a GPU."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices; sharded ones one by one, and those on a CPU, where large products are the faster."""
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if any(matrix.is_cpu or isinstance(matrix, DTensor) for matrix in matrices):
                super().step()
                return
            self._step_at_once(matrices, group)

    def _step_at_once(self, matrices: list[torch.Tensor], group: dict[str, Any]) -> None:
        gradients: list[Any] = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        alike = defaultdict(list)  # those of a shape, whichever way they lie
        for matrix, update in zip(matrices, updates, strict=True):
            is_wide = matrix.shape[0] <= matrix.shape[1]
            alike[tuple(sorted(matrix.shape))].append(
                (matrix if is_wide else matrix.mT, update if is_wide else update.mT)
            )
        for shape, pairs in alike.items():
            wide = torch.stack([update for _, update in pairs])  # [N, R, C]
            found = orthogonalise(wide, group["ns_coefficients"], group["ns_steps"], group["eps"])
            rate = -group["lr"] * RMS_OF_ADAMW * math.sqrt(shape[1])
            torch._foreach_add_([matrix for matrix, _ in pairs], list(found.unbind()), alpha=rate)


def orthogonalise(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """About the nearest matrices with orthonormal rows, in bf16, by a Newton-Schulz iteration.

    Args:
        matrices (`torch.Tensor`): `[N, R, C]`.
        coefficients (`tuple[float, float, float]`): Of the iteration's quintic polynomial.
        num_steps (`int`): Of the iteration.
        eps (`float`): Smallest norm that a matrix is divided by.

    Returns:
        `torch.Tensor`: `[N, R, C]`.
    """
    linear, cubic, quintic = coefficients
    found = matrices.bfloat16()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=eps)  # the spectral norm is at most 1 then
    for _ in range(num_steps):
        gram = torch.bmm(found, found.mT)
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), found, beta=linear)
    return found


class MuonWithAdamW(torch.optim.Optimizer):
    """[`BatchedMuon`] for the inner matrices of a model and `torch.optim.AdamW` for everything else.

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
        muon = BatchedMuon(inner, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        # A group, which may be empty: some drafters are matrices alone.
        adamw = torch.optim.AdamW([{"params": rest}], lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
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
