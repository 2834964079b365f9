"""`hf-domino plan`: does speculation pay, with how many proposals, and across which network.

Fed by rows of `hf-domino bench`, by numbers, or by rows in which numbers take the place of some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hf_domino.planner import Costs, Plan, alpha_for, conclusions, make_plan, survival_from
from hf_domino.planner.measured import Measured, read_measured

EXAMPLES = """\
  hf-domino plan --rows rows.jsonl --method domino
  hf-domino plan --alpha 0.8 --t-plain 10 --t-verify 10 12.9 --t-draft 1.6 --t-rollout 0.3 --network 5
"""

MAX_LENGTH = 128  # longer tables help nobody
DEFAULT_LENGTH = 16  # proposals per round of the published drafters
MS, GBIT = 1e-3, 1e9 / 8  # in seconds, in bytes
ACCEPTANCE = ("alpha", "acceptance_rate_at", "acceptance_length")
TIMES = {"t_plain": "plain", "t_draft": "draft", "t_rollout": "rollout", "network": "round_trip"}  # of one number
SIZES = {"feature_bytes": "transfer_per_token", "proposal_bytes": "transfer_per_proposal"}
ABOVE_ZERO = ("t_plain", "t_verify", "bandwidth")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino plan`."""
    add = parser.add_argument_group("from a measured run").add_argument
    add("--rows", type=Path, help="rows of `hf-domino bench`; the numbers below take the place of theirs")
    add("--method", default="domino", help="method whose rows are read")
    add("--mode", choices=("greedy", "sample"), default="greedy", help="mode whose rows are read")
    add = parser.add_argument_group("acceptance, one of").add_argument
    add("--alpha", type=float, nargs="+", help="chance of a proposal if all before are accepted; one, or by position")
    add("--acceptance-rate-at", type=float, nargs="+", help="share of rounds that accept each proposal: drafter.stats'")
    add("--acceptance-length", type=float, help="mean tokens per round, bonus included, with --num-draft-tokens")
    add = parser.add_argument_group("times, in ms").add_argument
    add("--t-plain", type=float, help="one token of the target alone")
    add("--t-verify", type=float, nargs="+", help="verification; or two, of 1 and of num-draft-tokens + 1 positions")
    add("--t-draft", type=float, help="the drafter's parallel part, per round")
    add("--t-rollout", type=float, help="the drafter's sequential part, per proposal; 0 for DFlash")
    add = parser.add_argument_group("drafter and target in separate pools").add_argument
    add("--network", type=float, help="round trip in ms; one per round")
    add("--bandwidth", type=float, help="Gbit/s at which the following is sent")
    add("--feature-bytes", type=float, help="context features of a token: layers x hidden size x bytes per number")
    add("--proposal-bytes", type=float, help="a proposal: 8 for its id; when sampling, also its law")
    parser.add_argument("--num-draft-tokens", type=int, help="most proposals per round (default: as measured, else 16)")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino plan`."""
    _check_numbers(options)
    measured = _measured(options) if options.rows else None
    survival = _survival(options, measured)
    plan = make_plan(survival, _costs(options, measured, len(survival)))
    sentences = conclusions(plan)
    if measured:
        sentences.append(f"Measured: {measured.speed_up:.2f} x with {len(measured.survival)} proposals, prefill aside.")
    if options.json:
        more = {"conclusions": sentences, "measured_speed_up": measured.speed_up if measured else None}
        print(json.dumps(asdict(plan) | more, allow_nan=False))
    else:
        _print_table(plan)
        print("\n".join(sentences))


def _measured(options: argparse.Namespace) -> Measured:
    from hf_domino.evaluation.benchmark.rows import read_rows

    return read_measured(read_rows(options.rows), options.method, options.mode)


def _check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers out of range, and both or neither of what excludes or needs the other."""
    for name in (*TIMES, *SIZES, "t_verify", "bandwidth"):
        for number in _as_list(getattr(options, name)):
            allowed = "above 0" if name in ABOVE_ZERO else "0 or more"
            if not (0 < number < float("inf") or (number == 0 and name not in ABOVE_ZERO)):
                raise ValueError(f"{_flag(name)} must be a finite number, {allowed}, got {number}.")
    length = options.num_draft_tokens
    if length is not None and not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"--num-draft-tokens must be in [1, {MAX_LENGTH}], got {length}.")
    given = [_flag(name) for name in ACCEPTANCE if getattr(options, name) is not None]
    if len(given) > 1 or not (given or options.rows):
        choice = "--alpha, --acceptance-rate-at, --acceptance-length or --rows"
        raise ValueError(f"acceptance must be given once, got {' and '.join(given) or 'none'}: give one of {choice}.")
    sizes = [_flag(name) for name in SIZES if getattr(options, name) is not None]
    if bool(sizes) != (options.bandwidth is not None):
        got = " and ".join(sizes) or "--bandwidth"
        raise ValueError(
            f"--bandwidth must be given with --feature-bytes or --proposal-bytes, got {got} alone: give both, or "
            "neither for the round trip alone."
        )


def _survival(options: argparse.Namespace, measured: Measured | None) -> list[float]:
    """Acceptance from the one flag that gives it, or from rows; as long as the plan."""
    length = options.num_draft_tokens or (len(measured.survival) if measured else DEFAULT_LENGTH)
    if options.acceptance_length is not None:
        return survival_from([_alpha_of(options.acceptance_length, length)] * length)
    if options.alpha is not None and len(options.alpha) == 1:
        return survival_from(options.alpha * length)
    if options.alpha is not None:
        survival = survival_from(options.alpha)
    elif options.acceptance_rate_at is not None:
        survival = options.acceptance_rate_at
    else:
        assert measured is not None  # _check_numbers saw to it
        survival = measured.survival
    if (options.num_draft_tokens or 0) > len(survival):
        raise ValueError(
            f"--num-draft-tokens must be in [1, {len(survival)}], the positions whose acceptance is known, got "
            f"{length}: give rates of more positions, or one --alpha for all."
        )
    return survival[: options.num_draft_tokens]


def _alpha_of(acceptance_length: float, length: int) -> float:
    alpha = alpha_for(acceptance_length, length) if acceptance_length >= 1 else None
    if alpha is None:
        raise ValueError(
            f"--acceptance-length must be in [1, {length + 1}], the bonus token and up to {length} proposals, got "
            f"{acceptance_length}: change it or --num-draft-tokens."
        )
    return alpha


def _costs(options: argparse.Namespace, measured: Measured | None, length: int) -> Costs:
    """Costs of rows, with the numbers given in their place."""
    times = {field: getattr(options, name) for name, field in TIMES.items()}
    given = {field: time * MS for field, time in times.items() if time is not None}
    given |= _verify_line(options.t_verify, length)
    sizes = {field: getattr(options, name) for name, field in SIZES.items()}
    given |= {field: size / (options.bandwidth * GBIT) for field, size in sizes.items() if size is not None}
    if measured:
        return replace(measured.costs, **given)
    missing = [_flag(name) for name in ("t_plain", "t_verify") if getattr(options, name) is None]
    if options.t_draft is None and options.t_rollout is None:
        missing.append("--t-draft or --t-rollout")
    if missing:
        raise ValueError(
            f"{', '.join(missing)} must be given in ms, got none: measure with `hf-domino bench` and plan from its "
            "--rows, or give the number (--t-draft 0 for a drafter that costs nothing)."
        )
    return Costs(**given)


def _verify_line(times: Sequence[float] | None, length: int) -> dict[str, float]:
    """Verification of one position, and of each further one, from its time at one or both ends."""
    if times is None:
        return {}
    if len(times) > 2 or times[-1] < times[0]:
        raise ValueError(
            f"--t-verify must be one number, or two that do not fall (1 position, {length + 1} positions), got "
            f"{' '.join(map(str, times))}: more positions take no less time; give one number if they take the same."
        )
    return {"verify": times[0] * MS, "verify_slope": (times[-1] - times[0]) * MS / length}


def _print_table(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for head in ("proposals", "tokens per round", "ms per round", "tokens/s", "speed-up", "break-even acceptance"):
        table.add_column(head, justify="right")
    for entry in plan.rounds:
        is_best = entry.length == plan.best_length
        limit = "" if entry.length == 0 else "never" if entry.break_even is None else f"{entry.break_even:.2f}"
        table.add_row(
            f"{'best: ' if is_best else ''}{entry.length or '0 (plain)'}",
            f"{entry.tokens:.2f}",
            f"{entry.seconds / MS:.2f}",
            f"{entry.tokens_per_second:.1f}",
            f"{entry.speed_up:.2f} x",
            limit,
            style="bold" if is_best else "",
        )
    Console().print(table)


def _as_list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
