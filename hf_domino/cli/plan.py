"""`hf-domino plan`: does speculation pay, and with how many proposals.

Fed by rows of `hf-domino bench`, by numbers, or by rows in which numbers take the place of some.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_domino.cli.flags import positive_int
from hf_domino.planner import Costs, Plan, conclusions, make_plan, survival_from

EXAMPLES = """\
  hf-domino plan --rows rows.jsonl --method domino
  hf-domino plan --alpha 0.8 --t-plain 10 --t-verify 10 12.9 --t-draft 1.6 --t-rollout 0.3
"""

DEFAULT_LENGTH = 16  # proposals per round of the published drafters
MS = 1e-3  # in seconds
TIMES = ("plain", "draft", "rollout")  # flags of one number, by the fields of `Costs`
HEADS = ("proposals", "tokens per round", "ms per round", "tokens/s", "speed-up", "break-even acceptance")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino plan`."""
    add = parser.add_argument_group("from a measured run").add_argument
    add("--rows", type=Path, help="rows of `hf-domino bench`; the numbers below take the place of theirs")
    add("--method", default="domino", help="method whose rows are read")
    add("--mode", choices=("greedy", "sample"), default="greedy", help="mode whose rows are read")
    add = parser.add_argument_group("acceptance").add_argument
    add("--alpha", type=float, nargs="+", help="chance of a proposal if all before are accepted; one, or by position")
    add("--num-draft-tokens", type=positive_int, help="most proposals per round (default: as measured, else 16)")
    add = parser.add_argument_group("times, in ms").add_argument
    add("--t-plain", type=float, dest="plain", help="one token of the target alone")
    add("--t-verify", type=float, nargs="+", help="verification; or two, of 1 and of num-draft-tokens + 1 positions")
    add("--t-draft", type=float, dest="draft", help="the drafter's parallel part, per round")
    add("--t-rollout", type=float, dest="rollout", help="its sequential part, per proposal; 0 for DFlash")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino plan`."""
    measured, costs, speed_up = list[float](), None, None
    if options.rows:
        from hf_domino.evaluation.benchmark.rows import read_rows

        measured, costs, speed_up = _measured(read_rows(options.rows), options.method, options.mode)
    survival = _survival(options, measured)
    plan = make_plan(survival, _costs(options, costs, len(survival)))
    print(_table(plan), *conclusions(plan), sep="\n")
    if measured:
        print(f"Measured: {speed_up:.2f} x with {len(measured)} proposals, prefill aside.")


def _measured(rows: Sequence[dict[str, Any]], method: str, mode: str) -> tuple[list[float], Costs, float]:
    """Take the acceptance, times and speed-up of one run from its summary.

    The phases of a round are disjoint; all but draft and rollout count as verification. A run measures that at one
    width. At one position it is taken to cost what a plain token does, or what it costs at that width if that is less.
    """
    from hf_domino.evaluation.benchmark.summary import rows_of, summarize

    lengths = {len(row["acceptance_rate_at"] or ()) for row in rows_of(rows, method, mode) if row["num_rounds"]}
    is_whole = (
        len(lengths) == 1 and 0 not in lengths and not method.endswith(("_adaptive", "_lookup", "_chain", "_tree"))
    )
    if not is_whole or not rows_of(rows, "plain", mode) or "draft" not in summarize(rows, method, mode).ms_per_round:
        found = sorted({f"{row['method']} ({row.get('mode')})" for row in rows if "skipped" not in row})
        raise ValueError(
            f"--rows must have plain generation and rounds of one length in mode {mode!r}, drafted by {method!r}, got "
            f"{', '.join(found)}: choose --mode, and as --method one that drafts whole blocks, such as domino."
        )
    plain, one = (summarize(rows, name, mode) for name in ("plain", method))
    survival, phases, token = one.acceptance_rate_at, one.ms_per_round, plain.tpot_ms or math.nan
    verify = sum(phases.values()) - phases["draft"] - phases["rollout"]
    verify_one = min(token, verify)
    times = token, verify_one, (verify - verify_one) / len(survival), phases["draft"], phases["rollout"] / len(survival)
    return survival, Costs(*(time * MS for time in times)), token / (one.tpot_ms or math.nan)


def _survival(options: argparse.Namespace, measured: list[float]) -> list[float]:
    """Take the acceptance from the flag, or from rows."""
    length, survival = options.num_draft_tokens or len(measured) or DEFAULT_LENGTH, measured
    if options.alpha:
        survival = survival_from(options.alpha * length if len(options.alpha) == 1 else options.alpha)
    if not survival:
        raise ValueError("--alpha or --rows must be given, got none.")
    if (options.num_draft_tokens or 0) > len(survival):
        raise ValueError(
            f"--num-draft-tokens must be in [1, {len(survival)}], the positions whose acceptance is known, got "
            f"{length}: give rates of more positions, or one --alpha for all."
        )
    return survival[: options.num_draft_tokens]


def _costs(options: argparse.Namespace, measured: Costs | None, length: int) -> Costs:
    """Take the costs from rows, and the numbers that are given in place of some."""
    given = {name: time * MS for name in TIMES if (time := getattr(options, name)) is not None}
    if options.t_verify:
        one, wide = options.t_verify[0], options.t_verify[-1]
        if len(options.t_verify) > 2 or wide < one:
            raise ValueError(
                f"--t-verify must be one number, or two that do not fall (1 position, {length + 1} positions), got "
                f"{options.t_verify}."
            )
        given |= {"verify": one * MS, "verify_slope": (wide - one) * MS / length}
    if measured:
        return replace(measured, **given)
    if not {"plain", "verify"} <= given.keys() or not {"draft", "rollout"} & given.keys():
        raise ValueError(
            "--t-plain, --t-verify, and --t-draft or --t-rollout must be given in ms (--t-draft 0 for a drafter that "
            "costs nothing), or --rows of `hf-domino bench`."
        )
    return Costs(**given)


def _table(plan: Plan) -> str:
    lines = ["  ".join(HEADS)]
    for entry in plan.rounds:
        limit = "" if entry.length == 0 else "never" if entry.break_even is None else f"{entry.break_even:.2f}"
        name = f"{'best: ' if entry.length == plan.best_length else ''}{entry.length or '0 (plain)'}"
        numbers = f"{entry.tokens:.2f}", f"{entry.seconds / MS:.2f}", f"{entry.tokens_per_second:.1f}"
        cells = (name, *numbers, f"{entry.speed_up:.2f} x", limit)
        lines.append("  ".join(f"{cell:>{len(head)}}" for cell, head in zip(cells, HEADS, strict=True)))
    return "\n".join(lines)
