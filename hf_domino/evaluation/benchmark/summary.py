"""Summarize one method in one mode over all prompts: medians, spread, acceptance, and the time in a round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_domino.evaluation.benchmark.options import BASELINE, FIRST_TOKEN, PEAK_MEMORY
from hf_domino.evaluation.check.estimate import estimate_mean
from hf_domino.evaluation.results import Result


@dataclass(frozen=True)
class Summary:
    """The summary of one method in one mode; fields without data are None or empty."""

    tokens_per_second: float  # median over prompts
    quartiles: tuple[float, float]  # tokens per second over all prompts and repeats
    speed_up: float  # over plain generation: the geometric mean over prompts
    acceptance_length: float | None  # mean over all rounds that drafted
    tokens_per_forward: float | None  # mean over all rounds, including prompt lookup and plain decode steps
    acceptance_rate_at: list[float]  # share of the drafted rounds that accepted proposal k
    ms_per_round: dict[str, float]  # mean of each phase
    distinct_4gram: float  # mean over prompts of the share of 4-grams that did not occur before in the text
    num_equal: int  # prompts whose tokens equal plain generation's
    num_prompts: int
    time_to_first_token: float | None = None  # median over prompts, in seconds
    peak_memory: float | None = None  # largest of all prompts, in bytes


def summarize(rows: Sequence[Result], method: str, mode: str) -> Summary:
    """Summarize one method in one mode."""
    chosen = rows_of(rows, method, mode)
    if not chosen or not rows_of(rows, BASELINE, mode):
        raise ValueError(f"no rows with method={method!r} and mode={mode!r}: measure them with `hf-domino bench`.")
    speeds = [row["new_tokens"] / seconds for row in chosen for seconds in row["seconds_each"]]
    if len(speeds) == 1:  # `quantiles` needs two
        speeds *= 2
    first, _, third = statistics.quantiles(speeds, n=4, method="inclusive")
    return Summary(
        tokens_per_second=statistics.median(row["tokens_per_second"] for row in chosen),
        quartiles=(first, third),
        speed_up=statistics.geometric_mean(speed_ups_of(rows, method, BASELINE, mode)),
        acceptance_length=_means(chosen, "acceptance_length", "num_drafted").get(0),
        tokens_per_forward=_means(chosen, "tokens_per_forward", "num_rounds").get(0),
        acceptance_rate_at=list(_means(chosen, "acceptance_rate_at", "num_drafted").values()),
        ms_per_round=_means(chosen, "ms_per_round", "num_rounds"),
        distinct_4gram=statistics.fmean(row["distinct_4gram"] for row in chosen),
        num_equal=count_equal(chosen),
        num_prompts=len(chosen),
        time_to_first_token=_over(chosen, FIRST_TOKEN, statistics.median),
        peak_memory=_over(chosen, PEAK_MEMORY, max),
    )


def _over(rows: Sequence[Result], field: str, summary: Callable[[list[float]], float]) -> float | None:
    values = [row[field] for row in rows if field in row]
    if values:
        return summary(values)
    return None


def speed_ups_of(rows: Sequence[Result], method: str, other: str, mode: str) -> list[float]:
    """Return the speed-up of one method over another for each prompt with which both were measured."""
    speeds = [{row["prompt"]: row["tokens_per_second"] for row in rows_of(rows, one, mode)} for one in (method, other)]
    return [speeds[0][prompt] / speeds[1][prompt] for prompt in sorted(speeds[0].keys() & speeds[1].keys())]


def speed_ratio(rows: Sequence[Result], method: str, other: str, mode: str) -> tuple[float, float, float]:
    """Return the geometric mean of one method's speed-up over another on the same prompts, and its 95 % interval."""
    mean = estimate_mean([[math.log(ratio)] for ratio in speed_ups_of(rows, method, other, mode)])
    return math.exp(mean), math.exp(mean.low), math.exp(mean.high)


def count_equal(rows: Iterable[Result]) -> int:
    """Count the results whose tokens equal those of plain generation."""
    return sum(bool(row["equals_plain"]) for row in rows)


def are_ties(row: Result) -> bool:
    """Return whether all divergent texts of a result diverge at a tie, where rounding decides between two tokens."""
    divergences = row.get("divergences") or ()
    return bool(divergences) and all(at["margin"] is not None and at["margin"] <= at["tie"] for at in divergences)


def rows_of(rows: Iterable[Result], method: str, mode: str) -> list[Result]:
    """Return the results of one method in one mode."""
    return [row for row in rows if row["method"] == method and row.get("mode") == mode]


def _means(rows: Iterable[Result], field: str, weight: str) -> dict[Any, float]:
    """Return the mean over rounds of each entry of a field (a single number is entry 0); empty without rounds."""
    counted = [row for row in rows if row[weight] and row[field]]
    sums: dict[Any, float] = {}
    for row in counted:
        entries = row[field]
        if not isinstance(entries, dict):
            entries = dict(enumerate(np.atleast_1d(entries)))
        for name, entry in entries.items():
            sums[name] = sums.get(name, 0.0) + row[weight] * float(entry)
    num_rounds = sum(row[weight] for row in counted)
    return {name: total / num_rounds for name, total in sums.items()}
