"""How likely counts like these are, where what was expected is true."""

from __future__ import annotations

import torch


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """P-value of Pearson's chi-square test; both have one sum, and every expected count is large enough."""
    statistic = ((observed.double() - expected.double()) ** 2 / expected.double()).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2).item()
