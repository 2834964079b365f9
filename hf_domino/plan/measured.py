"""Acceptance and times of a measured run, from the rows of `hf-domino bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_domino.planner import Costs
from hf_domino.report import Row

DRAFTING = ("draft", "rollout")  # the phases of a round that are not verification
REQUIRED = {
    "acceptance_rate_at": "a list, one share per proposal",
    "phases": "the seconds of draft, rollout, target_forward and what else a round has",
}


@dataclass(frozen=True)
class Measured:
    """What rows of one method say.

    Args:
        survival (`list[float]`): Share of rounds that accepted each proposal.
        costs (`Costs`): Means per round, proposal and token.
        speed_up (`float`): Over plain `generate`, of whole calls.
    """

    survival: list[float]
    costs: Costs
    speed_up: float


def read_measured(rows: Sequence[Row], method: str, mode: str) -> Measured:
    """Read acceptance and times from the rows of one run.

    The phases of a row are disjoint; all but draft and rollout count as verification. A run measures that at one width.
    At one position it is taken to cost what a plain token does, or what it costs at that width if that is less.

    Args:
        rows (`Sequence[Row]`): Rows of one run, with those of method `"plain"`.
        method (`str`): Whose rows to read.
        mode (`str`): `"greedy"` or `"sample"`.

    Raises:
        ValueError: If rows or fields are missing, or rows differ in their number of proposals.
    """
    plain, drafted = (_rows_of(rows, name, mode) for name in ("plain", method))
    seconds = [_sum(chosen, "seconds") / _sum(chosen, "new_tokens") for chosen in (plain, drafted)]
    rounds = [row for row in drafted if row.get("num_rounds")]
    _check_rounds(rounds, method, seconds[0])
    (length,) = {len(row["acceptance_rate_at"]) for row in rounds}
    num_rounds = _sum(rounds, "num_rounds")
    survival = [
        sum(row["num_rounds"] * row["acceptance_rate_at"][k] for row in rounds) / num_rounds for k in range(length)
    ]
    draft, rollout = (sum(row["phases"][name] for row in rounds) / num_rounds for name in DRAFTING)
    verify = sum(time for row in rounds for name, time in row["phases"].items() if name not in DRAFTING) / num_rounds
    verify_one = min(seconds[0], verify)
    costs = Costs(seconds[0], verify_one, (verify - verify_one) / length, draft, rollout / length)
    return Measured(survival, costs, seconds[0] / seconds[1])


def _rows_of(rows: Sequence[Row], method: str, mode: str) -> list[Row]:
    chosen = [row for row in rows if (row.get("method"), row.get("mode")) == (method, mode)]
    if not chosen:
        found = sorted({f"{row.get('method')} ({row.get('mode')})" for row in rows})
        raise ValueError(
            f"rows must have method {method!r} in mode {mode!r}, got {', '.join(found) or 'none'}: choose others with "
            "--method and --mode, or measure with `hf-domino bench`."
        )
    return chosen


def _sum(rows: Sequence[Row], field: str) -> Any:
    return sum(row[field] for row in rows)


def _check_rounds(rows: Sequence[Row], method: str, plain: float) -> None:
    """Refuse rows without what a plan needs; what they do have goes into the way out."""
    if not rows:
        raise ValueError(f"method {method!r} has no rounds: choose a drafter's rows with --method.")
    lacking = [f"{field} ({what})" for field, what in REQUIRED.items() if any(not row.get(field) for row in rows)]
    if lacking:
        length = sum(row["acceptance_length"] * row["num_rounds"] for row in rows) / _sum(rows, "num_rounds")
        raise ValueError(
            f"rows of method {method!r} must have {' and '.join(lacking)}, got none: measure again with `hf-domino "
            f"bench`, or plan from numbers. These rows give --t-plain {plain * 1e3:.3g} --acceptance-length "
            f"{length:.3g}; the other times are in drafter.stats.phases after a call inside hf_domino.timed_phases()."
        )
    for name in DRAFTING:
        if absent := [row["phases"] for row in rows if name not in row["phases"]]:
            raise ValueError(f"phases must have {' and '.join(DRAFTING)}, got {', '.join(absent[0])}: measure again.")
    lengths = sorted({len(row["acceptance_rate_at"]) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"acceptance_rate_at must have one length in all rows, got {lengths}: plan from one run's rows."
        )
