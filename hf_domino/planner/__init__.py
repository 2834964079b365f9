"""When speculation pays: `formulas` of speed-up, the `plan` they give, and acceptance and times as `measured`."""

from hf_domino.planner.formulas import (
    Costs,
    alpha_for,
    best_length,
    break_even,
    expected_tokens,
    max_round_trip,
    speed_ups,
    survival_from,
)
from hf_domino.planner.plan import Plan, Round, check_survival, conclusions, make_plan
from hf_domino.planner.trees import costs_by_width, tree_chances

__all__ = [
    "Costs",
    "Plan",
    "Round",
    "alpha_for",
    "best_length",
    "break_even",
    "check_survival",
    "conclusions",
    "costs_by_width",
    "expected_tokens",
    "make_plan",
    "max_round_trip",
    "speed_ups",
    "survival_from",
    "tree_chances",
]
