"""One method in one mode over all prompts: medians, spread, acceptance, the time in a round.

A round counts what is returned of it. Older rows count the last round of a text whole; their means are cut here, as far
as they tell what to cut.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_domino.evaluation.benchmark.methods import BASELINE, FLOOR
from hf_domino.evaluation.benchmark.rows import Row
from hf_domino.evaluation.check.estimate import estimate_mean

# Phases of a round that cannot be done without; all others are what a round costs beside them.
FORWARDS = ("draft", "rollout", "target_forward")


@dataclass(frozen=True)
class Summary:
    """One method in one mode over all prompts.

    Args:
        tokens_per_second (`float`): Median over prompts.
        quartiles (`tuple[float, float]`): Of tokens/s over all prompts and repeats.
        speed_up (`float`): `tokens_per_second` over plain generation's.
        speed_up_over_lean (`float`, *optional*): The same over the lean loop's.
        acceptance_length (`float`, *optional*): Mean over all rounds that drafted, or over all rounds of rows that do
            not tell them apart; None without rounds.
        tokens_per_forward (`float`, *optional*): Mean over all rounds, copies and single steps included; None without
            rounds.
        acceptance_rate_at (`list[float]`): Share of the same rounds as `acceptance_length` that accepted proposal k;
            empty without rounds.
        ttft_ms (`float`): Milliseconds to the first token, median over prompts.
        tpot_ms (`float`, *optional*): Milliseconds per further token, median over prompts; None without any.
        ms_per_round (`dict[str, float]`): Mean milliseconds of a round in each phase; empty without rounds of ours.
        peak_memory_bytes (`int`, *optional*): Most that any prompt took; None on a CPU.
        distinct_4gram (`float`): Mean over prompts of the share of 4-grams that are new.
        num_equal (`int`, *optional*): Prompts whose tokens equal plain generation's; None where that was not compared.
        num_prompts (`int`): Prompts measured.
        length_excess (`float`): By how much `acceptance_length` may be too high, of older rows that do not tell whether
            a text's last round drafted or copied.
        rate_excess (`float`): By how much an entry of `acceptance_rate_at` may be too high, of older rows.
    """

    tokens_per_second: float
    quartiles: tuple[float, float]
    speed_up: float
    speed_up_over_lean: float | None
    acceptance_length: float | None
    tokens_per_forward: float | None
    acceptance_rate_at: list[float]
    ttft_ms: float | None
    tpot_ms: float | None
    ms_per_round: dict[str, float]
    peak_memory_bytes: int | None
    distinct_4gram: float
    num_equal: int | None
    num_prompts: int
    length_excess: float
    rate_excess: float

    @property
    def overhead(self) -> float | None:
        """Share of a round outside the target's forward, the drafter's forward and the rollout."""
        whole = sum(self.ms_per_round.values())
        return 1 - sum(self.ms_per_round[name] for name in FORWARDS) / whole if whole else None


def summarize(rows: Sequence[Row], method: str, mode: str) -> Summary:
    """Summarize one method in one mode.

    Raises:
        ValueError: If there are no such rows.
    """
    chosen = rows_of(rows, method, mode)
    speed, plain, lean = (_median_speed(rows_of(rows, name, mode)) for name in (method, BASELINE, FLOOR))
    if speed is None or plain is None:
        raise ValueError(f"no rows with method={method!r} and mode={mode!r}: measure them with `hf-domino bench`.")
    drafted = sum(map(_num_drafted, chosen)) or 1
    peaks = [row["peak_memory_bytes"] for row in chosen if row["peak_memory_bytes"] is not None]
    return Summary(
        tokens_per_second=speed,
        quartiles=_quartiles(chosen),
        speed_up=speed / plain,
        speed_up_over_lean=speed / lean if lean else None,
        acceptance_length=_mean_length([(_num_drafted(row), _acceptance_length(row)) for row in chosen]),
        tokens_per_forward=_mean_length([(row["num_rounds"], _tokens_per_forward(row)) for row in chosen]),
        acceptance_rate_at=_mean_rates(chosen),
        ttft_ms=_median_ms(chosen, "ttft_seconds"),
        tpot_ms=_median_ms(chosen, "tpot_seconds"),
        ms_per_round=_mean_phases(chosen),
        peak_memory_bytes=max(peaks, default=None),
        distinct_4gram=statistics.fmean(row["distinct_4gram"] for row in chosen),
        num_equal=count_equal(chosen),
        num_prompts=len(chosen),
        length_excess=sum(map(_doubtful, chosen)) / drafted,
        rate_excess=sum(min(_surplus(row), len(row["sources"])) for row in chosen) / drafted,
    )


def speed_ups_of(rows: Sequence[Row], method: str, other: str, mode: str) -> list[float]:
    """How much faster one method is than another on each prompt that both were measured on."""
    speeds = [{row["prompt"]: row["tokens_per_second"] for row in rows_of(rows, one, mode)} for one in (method, other)]
    return [speeds[0][prompt] / speeds[1][prompt] for prompt in sorted(speeds[0].keys() & speeds[1].keys())]


def speed_ratio(rows: Sequence[Row], method: str, other: str, mode: str) -> tuple[float, float, float]:
    """How much faster one method is than another on the same prompts, and the 95 % interval of that.

    Returns:
        `tuple`: Geometric mean over prompts of the ratio of tokens/s, lower and upper end; 0 and infinity where prompts
        are too few to tell.
    """
    mean = estimate_mean([[math.log(ratio)] for ratio in speed_ups_of(rows, method, other, mode)])
    return math.exp(mean), math.exp(mean.low), math.exp(mean.high)


def count_equal(rows: Sequence[Row]) -> int | None:
    """How many of these rows have plain generation's tokens; None where they do not say."""
    found = [row["equals_plain"] for row in rows if row["equals_plain"] is not None]
    return sum(found) if found else None


def are_ties(row: Row) -> bool:
    """Whether all texts of a row part from plain generation's at a tie, where rounding decides."""
    partings = row.get("partings") or ()
    return bool(partings) and all(at["margin"] is not None and at["margin"] <= at["tie"] for at in partings)


def rows_of(rows: Iterable[Row], method: str, mode: str) -> list[Row]:
    """The measured rows of one method in one mode."""
    return [row for row in rows if row["method"] == method and row.get("mode") == mode]


def _median_speed(rows: Sequence[Row]) -> float | None:
    return statistics.median(row["tokens_per_second"] for row in rows) if rows else None


def _quartiles(rows: Sequence[Row]) -> tuple[float, float]:
    speeds = [row["new_tokens"] / seconds for row in rows for seconds in row["seconds_each"]]
    if len(speeds) == 1:
        return speeds[0], speeds[0]
    first, _, third = statistics.quantiles(speeds, n=4, method="inclusive")
    return first, third


def _median_ms(rows: Iterable[Row], field: str) -> float | None:
    values = [row[field] for row in rows if row[field] is not None]
    return 1000 * statistics.median(values) if values else None


def _num_drafted(row: Row) -> int:
    """Rounds with proposals; all rounds in rows that do not tell them apart."""
    count: int | None = row.get("num_drafted")
    return row["num_rounds"] if count is None else count


def _tokens_per_forward(row: Row) -> float | None:
    counted = _counted(row)
    return None if counted is None else counted - _surplus(row) / row["num_rounds"]


def _acceptance_length(row: Row) -> float | None:
    counted: float | None = row["acceptance_length"]
    if counted is None or row.get("num_copied"):
        return counted
    return counted - _surplus(row) / _num_drafted(row)


def _counted(row: Row) -> float | None:
    """Tokens per forward as the row has it."""
    return row.get("tokens_per_forward", row["acceptance_length"])


def _surplus(row: Row) -> int:
    """Tokens that a row's rounds count behind the ends of its texts."""
    counted = _counted(row)
    if counted is None:
        return 0
    return max(round(counted * row["num_rounds"]) - row["new_tokens"] + len(row["sources"]), 0)


def _doubtful(row: Row) -> int:
    """Most of these that were of rounds that drafted, where others copied: not more than such rounds ever accepted."""
    if not row.get("num_copied"):
        return 0
    longest = sum(rate > 0 for rate in row["acceptance_rate_at"] or ())
    return min(_surplus(row), len(row["sources"]) * longest)


def _mean_length(weighted: Iterable[tuple[int, float | None]]) -> float | None:
    counted = [(weight, length) for weight, length in weighted if weight and length is not None]
    rounds = sum(weight for weight, _ in counted)
    return sum(length * weight for weight, length in counted) / rounds if rounds else None


def _mean_rates(rows: Iterable[Row]) -> list[float]:
    """Rates of all rounds together; a row that says nothing of a position accepted none there."""
    counted = [row for row in rows if row["acceptance_rate_at"]]
    rounds = sum(map(_num_drafted, counted))
    depth = max((len(row["acceptance_rate_at"]) for row in counted), default=0)
    padded = [(_num_drafted(row), row["acceptance_rate_at"] + [0.0] * depth) for row in counted]
    return [sum(weight * rates[k] for weight, rates in padded) / rounds for k in range(depth)]


def _mean_phases(rows: Iterable[Row]) -> dict[str, float]:
    counted = [row for row in rows if row["ms_per_round"]]
    rounds = sum(row["num_rounds"] for row in counted)
    names = counted[0]["ms_per_round"] if counted else {}
    return {name: sum(row["num_rounds"] * row["ms_per_round"][name] for row in counted) / rounds for name in names}
