"""Estimate means with their sampling error, from whole texts, because the rounds of one text resemble each other.

The error is half the width of a 95 % confidence interval, by Student's t over the sums of the texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Student's t, two-sided at 95 %, for 1, 2, ... degrees of freedom; the last value is used for all higher ones.
T_QUANTILES = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
MIN_ROUNDS = 8  # fewer rounds can agree by chance


class Estimate(float):
    """A mean over all rounds, NaN without rounds, with its error: half the width of the confidence interval."""

    error: float  # infinite for fewer than two texts or eight rounds

    def __new__(cls, mean: float, error: float = math.inf) -> Estimate:
        """Make a number with an error."""
        estimate = super().__new__(cls, mean)
        estimate.error = error
        return estimate

    @property
    def low(self) -> float:
        """Lower end of the confidence interval."""
        return self - self.error

    @property
    def high(self) -> float:
        """Upper end of the confidence interval."""
        return self + self.error

    def to_dict(self) -> dict[str, float | None]:
        """Return mean and error for JSON, with None instead of NaN and infinity."""
        mean = float(self) if math.isfinite(self) else None
        error = self.error if math.isfinite(self.error) else None
        return {"mean": mean, "error": error}

    def __str__(self) -> str:
        if math.isfinite(self.error):
            error = f"{self.error:.2f}"
        else:
            error = "?"
        return f"{self:.2f} ± {error}"


def estimate_mean(texts: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean of a quantity that was measured in every round of several texts."""
    texts = [text for text in texts if text]
    num_rounds = sum(len(text) for text in texts)
    if not num_rounds:
        return Estimate(math.nan)
    mean = sum(sum(text) for text in texts) / num_rounds
    if len(texts) < 2 or num_rounds < MIN_ROUNDS:
        return Estimate(mean)
    between = sum((sum(text) - mean * len(text)) ** 2 for text in texts) * len(texts) / (len(texts) - 1)
    # Texts that agree by chance must not make the error smaller than that of independent rounds.
    within = sum((value - mean) ** 2 for text in texts for value in text)
    quantile = T_QUANTILES[min(len(texts) - 1, len(T_QUANTILES)) - 1]
    return Estimate(mean, quantile * math.sqrt(max(between, within)) / num_rounds)


def estimate_difference(texts: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Estimate:
    """Estimate how much larger a quantity is than `before`, measured in the same rounds of the same texts."""
    pairs = zip(texts, before, strict=True)
    return estimate_mean([[value - other for value, other in zip(*pair, strict=True)] for pair in pairs])
