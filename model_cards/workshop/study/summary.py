"""What the rows of one budget say of each variant, and what of it is more than chance.

How far runs of one variant scatter over seeds is pooled over all variants that have several; a difference counts if it
is larger than what two means of that scatter differ by in 95 of 100 cases (Student's t).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from hf_domino.evaluation.check.estimate import T_QUANTILES
from hf_domino.evaluation.results import Result
from study.plan import Study

MEANS = ["base_loss", "corrected_loss", "parameters", "seconds", "cpu_seconds"]
LENGTH = "acceptance_length"


class Difference(NamedTuple):
    """Acceptance length of a variant over that of another, of their means; `above` counts the seeds both have."""

    against: str
    mean: float
    ratio: float
    error: float | None  # what chance explains, 95 %; None where no variant has several seeds
    above: int
    seeds: int

    @property
    def is_clear(self) -> bool:
        """Whether it is more than chance."""
        return self.error is not None and abs(self.mean) > self.error


class Summary(NamedTuple):
    """A variant over its seeds; `low` and `high` are the lowest and highest run, losses and costs are means."""

    variant: str
    question: str
    seeds: list[int]
    acceptance_length: float
    low: float
    high: float
    difference: Difference | None
    acceptance_rate_at: list[float]
    figures: dict[str, float]


def summarize(study: Study, rows: Sequence[Result]) -> list[Summary]:
    """Summarize the variants of a study that have rows, in its order."""
    frame = _frame(rows)
    by_seed = frame.pivot(index="seed", columns="method", values=LENGTH)
    means, scatter = frame.groupby("method")[LENGTH].mean(), pooled_scatter(rows)
    summaries = []
    for name in (name for name in study.variants if name in by_seed):
        own, variant = frame[frame["method"] == name], study.variants[name]
        against = variant.against
        is_compared = against in by_seed and against != name
        summaries.append(
            Summary(
                variant=name,
                question=variant.question,
                seeds=sorted(own["seed"].tolist()),
                acceptance_length=float(means[name]),
                low=float(own[LENGTH].min()),
                high=float(own[LENGTH].max()),
                difference=_difference(by_seed, means, name, against, scatter) if is_compared else None,
                acceptance_rate_at=np.mean(own["acceptance_rate_at"].tolist(), axis=0).tolist(),
                figures=own[MEANS].mean().to_dict(),
            )
        )
    return summaries


def _frame(rows: Sequence[Result]) -> pd.DataFrame:
    return pd.DataFrame([dict(row) for row in rows])


def pooled_scatter(rows: Sequence[Result]) -> tuple[float, int]:
    """Standard deviation over seeds, pooled over variants, and its degrees of freedom; (nan, 0) without any."""
    groups = _frame(rows).groupby("method")[LENGTH]
    freedom = int((groups.size() - 1).sum())
    squares = (groups.var() * (groups.size() - 1)).sum()
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)


def _difference(
    by_seed: pd.DataFrame, means: pd.Series, name: str, against: str, scatter: tuple[float, int]
) -> Difference:
    deviation, freedom = scatter
    error = None
    if freedom:
        quantile = T_QUANTILES[min(freedom, len(T_QUANTILES)) - 1]
        error = quantile * deviation * math.sqrt((1 / by_seed[[name, against]].count()).sum())
    both = by_seed[[name, against]].dropna()
    own, other = float(means[name]), float(means[against])
    return Difference(against, own - other, own / other, error, int((both[name] > both[against]).sum()), len(both))


def conditional_rates(rates: Sequence[float]) -> list[float]:
    """Share of rounds that accept each position among those that accepted all before it.

    Example:
    ```python
    >>> from study.summary import conditional_rates
    >>> conditional_rates([0.5, 0.25, 0.0, 0.0])
    [0.5, 0.5, 0.0]

    ```
    """
    before = [1.0, *rates]
    return [rate / earlier for rate, earlier in zip(rates, before, strict=False) if earlier]
