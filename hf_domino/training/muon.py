"""One optimizer with Muon for the weight matrices, and AdamW for embeddings, output projections and norms.

With orthogonalised updates (Muon, K. Jordan, 2024), small models leave their first plateau after about a third of
AdamW's steps.

Shapes: N matrices of one shape, R rows, C columns, R at most C.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hf_domino._common.dtypes import fast_dtype

# Parts of the names of matrices that AdamW trains: of those with a row for each token, and of those that feed them
# (`embed_proj.0`).
BY_TOKEN = ("embed", "markov_w", "codebook")
MOMENTUM = 0.95  # Muon's, the same as torch's default
RMS_OF_ADAMW = 0.2  # RMS of AdamW's updates, to which torch's "match_rms_adamw" scales, too
SMALLEST_NORM = 1e-7  # least norm by which a matrix is divided
# Polynomials a x + b x^3 + c x^5 of the iteration. Each is optimal after those before it, for singular values from 1e-3
# to 1 ("Polar Express", arXiv 2505.16932). On the bundled pair, a training step learns more with these five than with
# five iterations of torch's own polynomial, and less with only four of them.
POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
MARGIN = 1.01  # allows for rounding in each iteration: beyond their range, polynomials of degree 5 diverge


def muon_factory() -> type[MuonWithAdamW]:
    """Return the class that Transformers' trainer calls with the model and the options; it asks for a factory."""
    return MuonWithAdamW


def trains_with_muon(name: str, parameter: torch.Tensor) -> bool:
    """Return whether Muon trains a parameter of a model: a matrix that is neither an embedding nor one like it."""
    return parameter.ndim == 2 and not any(part in name for part in BY_TOKEN)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon with better polynomials for the inner matrices of a model, and `torch.optim.AdamW` for everything else.

    Torch's Muon uses the same polynomial in every iteration, handles one matrix at a time, and orthogonalises every
    matrix in every process. Here, every process keeps all momenta, orthogonalises its share of the matrices of a shape,
    and sends the results to the others.

    Args:
        model (`nn.Module`): The model. Muon trains the matrices that [`trains_with_muon`] names, and AdamW the rest.
        muon_lr (`float`): Learning rate of Muon, in units of AdamW's (updates are rescaled to the size of AdamW's).
        adamw_lr (`float`): Learning rate of AdamW.
        weight_decay (`float`): Weight decay of the matrices; the rest has none.
    """

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float, weight_decay: float):
        inner: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (inner if trains_with_muon(name, parameter) else rest).append(parameter)
        muon = {"params": inner, "lr": muon_lr, "weight_decay": weight_decay, "momentum": MOMENTUM}
        # Given as a group because it can be empty: some drafters have only matrices.
        self._adamw = torch.optim.AdamW(
            [{"params": rest}], lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        super().__init__([muon, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        group = self.param_groups[0]
        if matrices := [matrix for matrix in group["params"] if matrix.grad is not None]:
            self._update(matrices, group)
        # AdamW shares our groups and state, which schedulers and checkpoints change or replace.
        self._adamw.param_groups = self.param_groups[1:]
        self._adamw.state = self.state
        self._adamw.step()

    def _update(self, matrices: list[torch.Tensor], group: dict[str, Any]) -> None:
        gradients: list[Any] = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        is_wide = [matrix.shape[0] <= matrix.shape[1] for matrix in matrices]
        wide = [update if lies else update.mT for update, lies in zip(updates, is_wide, strict=True)]
        for matrix, update, lies in zip(matrices, _orthogonal(wide), is_wide, strict=True):
            found = update if lies else update.mT
            matrix.add_(found, alpha=-group["lr"] * RMS_OF_ADAMW * math.sqrt(update.shape[1]))


def _orthogonal(wide: list[torch.Tensor]) -> list[torch.Tensor]:
    """Orthogonalise matrices, `[R, C]` each; the processes share the matrices of one shape among them."""
    rank, num_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    groups = defaultdict(list)
    for place, matrix in enumerate(wide):  # on a CPU, a single process is fastest with one matrix at a time
        groups[place if matrix.is_cpu and num_processes == 1 else matrix.shape].append(place)
    found: dict[int, torch.Tensor] = {}
    for places in groups.values():
        if len(places) == 1:
            found[places[0]] = orthogonalise(wide[places[0]])
            continue
        stack = torch.stack([wide[place] for place in places])  # [N, R, C]
        stack = F.pad(stack, (0, 0, 0, 0, 0, -len(stack) % num_processes))
        made = orthogonalise(stack.chunk(num_processes)[rank]).contiguous()
        if num_processes > 1:
            whole = made.new_empty(stack.shape)
            # Sent as bytes, because every backend supports those.
            dist.all_gather_into_tensor(whole.view(torch.uint8), made.view(torch.uint8))
            made = whole
        found |= dict(zip(places, made, strict=False))
    return [found[place] for place in range(len(wide))]


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Approximate the nearest matrices with orthonormal rows, `[R, C]` or `[N, R, C]`, in bf16 if that is fast."""
    # `@` would need more kernel launches.
    product, add_product = (torch.mm, torch.addmm) if matrices.ndim == 2 else (torch.bmm, torch.baddbmm)
    norm = matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    found = (matrices / norm).to(fast_dtype(matrices.device.type))  # the spectral norm is at most 1
    for linear, cubic, quintic in POLYNOMIALS:
        gram = product(found, found.mT)
        cubic = cubic / MARGIN**3
        quintic = quintic / MARGIN**5
        update = add_product(gram, gram, gram, beta=cubic, alpha=quintic)
        found = add_product(found, update, found, beta=linear / MARGIN)
    return found
