"""The sequential part of a Domino draft as fused kernels: read a token, correct the logits, choose the next token.

There are two operations for chains of proposals and two for the branches of trees. Each exists as a Triton kernel and
as a plain PyTorch reference (`domino_kernels.reference`). Triton runs if it is installed and the tensors are on a CUDA
device; [`use_backend`] and `DOMINO_KERNELS_BACKEND` override that.

Imports inside this package are relative because Hugging Face's kernel loader imports it under another name.
"""

from .dispatch import BACKENDS, MAX_AUTO_ROWS, runs_triton, use_backend
from .ops import advance_branches, correct_and_choose, correct_branches, gru_step

__all__ = [
    "BACKENDS",
    "MAX_AUTO_ROWS",
    "advance_branches",
    "correct_and_choose",
    "correct_branches",
    "gru_step",
    "runs_triton",
    "use_backend",
]
