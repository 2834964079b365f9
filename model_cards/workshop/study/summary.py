"""What the rows of one budget say of each variant, and what of it is more than chance.

How far runs of one variant scatter over seeds is pooled over all variants that have several; a difference counts if it
is larger than what two means of that scatter differ by in 95 of 100 cases (Student's t).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_domino.evaluation.check.estimate import T_QUANTILES
from study.plan import Study
from study.rows import Row

MEANS = ("base_loss", "corrected_loss", "parameters", "seconds", "cpu_seconds")


@dataclass(frozen=True)
class Difference:
    """Acceptance length of a variant over that of another.

    Args:
        against (`str`): The other one.
        mean (`float`): The one mean less the other.
        ratio (`float`): The one mean over the other.
        error (`float`, *optional*): What chance explains, 95 %; None where no variant has several seeds.
        above, seeds (`int`): Seeds at which it is above the other, of those that both have.
    """

    against: str
    mean: float
    ratio: float
    error: float | None
    above: int
    seeds: int

    @property
    def is_clear(self) -> bool:
        """Whether it is more than chance."""
        return self.error is not None and abs(self.mean) > self.error


@dataclass(frozen=True)
class Summary:
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

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarize(study: Study, rows: Sequence[Row]) -> list[Summary]:
    """Summarize the variants of a study that have rows, in its order."""
    runs = {name: [row for row in rows if row["variant"] == name] for name in study.variants}
    scatter = pooled_scatter(list(runs.values()))
    return [_summary(study, name, runs, scatter) for name in study.variants if runs[name]]


def pooled_scatter(groups: Sequence[Sequence[Row]]) -> tuple[float, int]:
    """Standard deviation over seeds, pooled over variants, and its degrees of freedom; (nan, 0) without any."""
    several = [_lengths(rows) for rows in groups if len(rows) > 1]
    freedom = sum(len(lengths) - 1 for lengths in several)
    squares = sum(statistics.variance(lengths) * (len(lengths) - 1) for lengths in several)
    return (math.sqrt(squares / freedom), freedom) if freedom else (math.nan, 0)


def _lengths(rows: Sequence[Row]) -> list[float]:
    return [row["acceptance_length"] for row in rows]


def _summary(study: Study, name: str, runs: dict[str, list[Row]], scatter: tuple[float, int]) -> Summary:
    variant, rows = study.variants[name], runs[name]
    lengths, others = _lengths(rows), runs[variant.against]
    rates = zip(*(row["acceptance_rate_at"] for row in rows), strict=True)
    return Summary(
        variant=name,
        question=variant.question,
        seeds=sorted(row["seed"] for row in rows),
        acceptance_length=statistics.mean(lengths),
        low=min(lengths),
        high=max(lengths),
        difference=_difference(variant.against, rows, others, scatter) if others and name != variant.against else None,
        acceptance_rate_at=[statistics.mean(place) for place in rates],
        figures={field: statistics.mean(row[field] for row in rows) for field in MEANS},
    )


def _difference(against: str, rows: list[Row], others: list[Row], scatter: tuple[float, int]) -> Difference:
    mean, other = statistics.mean(_lengths(rows)), statistics.mean(_lengths(others))
    deviation, freedom = scatter
    error = None
    if freedom:
        quantile = T_QUANTILES[min(freedom, len(T_QUANTILES)) - 1]
        error = quantile * deviation * math.sqrt(1 / len(rows) + 1 / len(others))
    of_seed = {row["seed"]: row["acceptance_length"] for row in others}
    pairs = [(row["acceptance_length"], of_seed[row["seed"]]) for row in rows if row["seed"] in of_seed]
    above = sum(own > theirs for own, theirs in pairs)
    return Difference(against, mean - other, mean / other, error, above, len(pairs))


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
