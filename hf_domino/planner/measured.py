"""Acceptance and times of a measured run, from the rows of `hf-domino bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_domino.planner.formulas import Costs

if TYPE_CHECKING:
    from hf_domino.evaluation.benchmark.rows import Row

DRAFTING = ("draft", "rollout")  # the phases of a round that are not verification
BASELINE = "plain"
TIME = {"tpot_seconds": "seconds per token after the first"}
ROUNDS = {
    "acceptance_rate_at": "share of rounds that accepted each proposal",
    "ms_per_round": "milliseconds of draft, rollout, target_forward and what else a round has",
}


@dataclass(frozen=True)
class Measured:
    """What rows of one method say.

    Args:
        survival (`list[float]`): Share of rounds that accepted each proposal, before the end of their text.
        costs (`Costs`): Means per round, proposal and token.
        speed_up (`float`): Over plain `generate`, prefill aside.
    """

    survival: list[float]
    costs: Costs
    speed_up: float


def read_measured(rows: Sequence[Row], method: str, mode: str) -> Measured:
    """Read acceptance and times from the rows of one run.

    The phases of a row are disjoint; all but draft and rollout count as verification. A run measures that at one width.
    At one position it is taken to cost what a plain token does, or what it costs at that width if that is less.

    Raises:
        ValueError: If rows or fields are missing, or rows or rounds differ in their number of proposals.
    """
    drafter, _, way = method.partition("_")
    if way in ("adaptive", "lookup", "chain", "tree"):
        raise ValueError(
            f"method must be one that drafts whole blocks, got {method!r}, whose rounds differ in length: plan from "
            f"--method {drafter}."
        )
    plain, drafted = (_rows_of(rows, name, mode) for name in (BASELINE, method))
    rounds = [row for row in drafted if row.get("num_rounds")]
    if not rounds:
        raise ValueError(f"method {method!r} has no rounds to plan from: choose a drafter's rows with --method.")
    _check_fields(plain, rounds, method)
    length = _common_length(rounds)
    survival = [_mean([row["acceptance_rate_at"][k] for row in rounds], rounds, "num_rounds") for k in range(length)]
    draft, rollout = (
        _mean([row["ms_per_round"][name] for row in rounds], rounds, "num_rounds") / 1000 for name in DRAFTING
    )
    whole = _mean([sum(row["ms_per_round"].values()) for row in rounds], rounds, "num_rounds") / 1000
    t_plain, t_drafted = (_mean([row["tpot_seconds"] for row in of], of, "new_tokens") for of in (plain, rounds))
    verify = whole - draft - rollout
    verify_one = min(t_plain, verify)
    costs = Costs(t_plain, verify_one, (verify - verify_one) / length, draft, rollout / length)
    return Measured(survival, costs, t_plain / t_drafted)


def _rows_of(rows: Sequence[Row], method: str, mode: str) -> list[Row]:
    chosen = [row for row in rows if (row.get("method"), row.get("mode")) == (method, mode)]
    # A text of one token has no time per further token.
    chosen = [row for row in chosen if row.get("tpot_seconds", 0) is not None]
    if not chosen:
        found = sorted({f"{row.get('method')} ({row.get('mode')})" for row in rows if "skipped" not in row})
        raise ValueError(
            f"rows must have method {method!r} in mode {mode!r}, got {', '.join(found) or 'none'}: choose others with "
            "--method and --mode, or measure with `hf-domino bench`."
        )
    return chosen


def _check_fields(plain: Sequence[Row], rounds: Sequence[Row], method: str) -> None:
    """Refuse rows without what a plan needs; what they do have goes into the way out."""
    lacking = _lacking(plain, BASELINE, TIME) + _lacking(rounds, method, ROUNDS | TIME)
    if lacking:
        t_plain = sum(row["seconds"] for row in plain) / sum(row["new_tokens"] for row in plain)
        tokens = _mean([row["acceptance_length"] for row in rounds], rounds, "num_rounds")
        raise ValueError(
            f"rows must have {', '.join(lacking)}, got none: measure again with `hf-domino bench`, or plan from "
            f"numbers. These rows give --t-plain {t_plain * 1000:.3g} --acceptance-length {tokens:.3g}; --t-draft, "
            "--t-rollout and --t-verify follow from drafter.stats.phases after a call inside hf_domino.timed_phases()."
        )
    for name in DRAFTING:
        if absent := [row["ms_per_round"] for row in rounds if name not in row["ms_per_round"]]:
            raise ValueError(
                f"ms_per_round must have {' and '.join(DRAFTING)}, got {', '.join(absent[0])}: measure again."
            )


def _lacking(rows: Sequence[Row], method: str, fields: dict[str, str]) -> list[str]:
    return [f"{field} ({what}; {method})" for field, what in fields.items() if any(not row.get(field) for row in rows)]


def _common_length(rows: Sequence[Row]) -> int:
    lengths = sorted({len(row["acceptance_rate_at"]) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"acceptance_rate_at must have one length in all rows, got {lengths}: plan from one run's rows."
        )
    return lengths[0]


def _mean(values: Sequence[float], rows: Sequence[Row], weight: str) -> Any:
    """Mean of one value per row, weighted by a field of the rows."""
    weights = [row[weight] for row in rows]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
