"""How a drafter was trained, as a section of its card, from what the trainer recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerState

LOG_COLUMNS = (
    "step", "num_input_tokens_seen", "hours", "lambda_base", "base_loss", "corrected_loss", "acceptance_length",
)  # fmt: skip
EVALUATION = ("loss", "base_loss", "acceptance_length", "walked_acceptance_length")
MOST_LOG_ROWS = 12


def training_section(state: TrainerState, facts: Mapping[str, Any] | None = None) -> str:
    """What a trainer recorded, as a section of a card: steps, tokens, hours, the loss log and the last evaluation.

    Args:
        state (`TrainerState`): Of the trainer, or read from its `trainer_state.json`.
        facts (`Mapping`, *optional*): More rows for the first table, such as the settings.
    """
    log = [entry for entry in state.log_history if "base_loss" in entry]
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    recorded = {
        "steps": state.global_step,
        "tokens read": state.num_input_tokens_seen or None,
        "hours": log[-1].get("hours") if log else None,
    } | dict(facts or {})
    parts = ["## Training", _table(("", ""), [(name, value) for name, value in recorded.items() if value is not None])]
    if log:
        columns = [name for name in LOG_COLUMNS if any(name in entry for entry in log)]
        rows = [[entry.get(name) for name in columns] for entry in _thinned(log)]
        parts += ["The loss log; acceptance lengths in it are teacher-forced.", _table(columns, rows)]
    if evaluations:
        last = evaluations[-1]
        figures = [(name, last[f"eval_{name}"]) for name in EVALUATION if f"eval_{name}" in last]
        parts += [f"Evaluation after step {last['step']}.", _table(("", ""), figures)]
    return "\n\n".join(parts)


def _thinned(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_LOG_ROWS` entries, evenly spread, the first and the last among them."""
    count = min(len(log), MOST_LOG_ROWS)
    return [log[round(index * (len(log) - 1) / max(count - 1, 1))] for index in range(count)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_figure(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(getattr(value, "value", value))
