"""Describe in a section of a card how the drafter was trained, from the record of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino._common.run_record import Run

LOG_COLUMNS = (
    "step", "num_input_tokens_seen", "hours", "lambda_base", "base_loss", "corrected_loss", "acceptance_length",
)  # fmt: skip
EVALUATION = (
    "base_loss", "loss", "base_acceptance_length", "acceptance_length", "base_walked_acceptance_length",
    "walked_acceptance_length", "predicted_speed_up",
)  # fmt: skip
FIGURE = "figures/training.svg"
LOSSES = {"base_loss": "without correction", "corrected_loss": "as drafted", "eval_loss": "as drafted, held-out text"}
POSITIONS = {"eval_base_accept_at_": "without correction", "eval_accept_at_": "as drafted"}
MOST_LOG_ROWS = 12
OF_A_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")  # their product: its examples
NOT_SHOWN = ("use_peft",)  # the LoRA fields show it
PACKAGES = ("hf_domino", "torch", "transformers")
LOG_NOTE = "Losses during training. Acceptance lengths in this table assume that all earlier tokens are right."
EVALUATION_NOTE = (
    "Evaluation on held-out text. Walked acceptance lengths are simulated: rounds run along the text as in generation. "
    "Columns with `base_` are without the correction head."
)


def training_section(run: Run, folder: Path | None = None) -> str:
    """Write a section with the texts, arguments, losses and evaluations of a run.

    If `folder` has the picture that [`draw_training`] draws, the section shows it.
    """
    log = run.training_log
    evaluations = run.evaluations
    known = [(name, value) for name, value in _facts(run).items() if value is not None]
    parts = ["## Training", _table(("", ""), known)]
    if log:
        parts += [LOG_NOTE, _columns(log, LOG_COLUMNS)]
    if evaluations:
        parts += [EVALUATION_NOTE, _columns(evaluations, EVALUATION, prefix="eval_")]
    if folder is not None and (folder / FIGURE).is_file():
        parts.append(f"![Losses by step, and acceptance by position]({FIGURE})")
    return "\n\n".join(parts)


def _facts(run: Run) -> dict[str, Any]:
    """List what the first table of the section says; what is unknown is None."""
    log = run.training_log
    facts: dict[str, Any] = {"steps": run.steps, "tokens read": run.tokens or None}
    facts["hours"] = log[-1].get("hours") if log else None
    for use, text in run.texts.items():
        facts[f"{use} data set"] = text.dataset
        facts[f"{use} rows"] = text.examples
        facts[f"{use} tokens"] = text.tokens or None
        facts[f"{use} rows left out"] = text.left_out or None
    sizes = [run.arguments.get(name) for name in OF_A_STEP]
    if None not in sizes:
        facts["rows per step"] = math.prod(sizes)
    facts |= {name: value for name, value in run.arguments.items() if name not in NOT_SHOWN}
    made = run.provenance
    versions = [f"{package} {made[package]}" for package in PACKAGES if package in made]
    facts |= {"hardware": made.get("hardware"), "versions": ", ".join(versions) or None, "date": made.get("date")}
    return facts


def draw_training(run: Run, folder: Path) -> None:
    """Draw the losses of all logged steps, and how often each position was right in the last evaluation.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    log = run.training_log
    evaluations = run.evaluations
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for field, label in LOSSES.items():
        entries = [entry for entry in (*log, *evaluations) if field in entry]
        is_corrected = any(entry.get(field) != entry.get("corrected_loss") for entry in entries)
        if entries and (is_corrected or field == "corrected_loss"):
            left.plot(*zip(*((entry["step"], entry[field]) for entry in entries), strict=True), marker=".", label=label)
    left.set(xlabel="step", ylabel="loss")
    last = evaluations[-1] if evaluations else {}
    for prefix, label in POSITIONS.items():
        rates = {int(field.removeprefix(prefix)): value for field, value in last.items() if field.startswith(prefix)}
        if rates:
            right.plot(*zip(*sorted(rates.items()), strict=True), marker="o", label=label)
    right.set(xlabel="position in the draft", ylabel="share that is right, if all before are", ylim=(0, 1))
    for axes in (left, right):
        if axes.lines:
            axes.legend()
    path = folder / FIGURE
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _columns(entries: Sequence[Mapping[str, Any]], wanted: Sequence[str], prefix: str = "") -> str:
    """Make a table of at most `MOST_LOG_ROWS` evenly spaced entries, with the columns that any entry has."""
    fields = {"step": "step"} if prefix else {}
    fields |= {name: f"{prefix}{name}" for name in wanted if any(f"{prefix}{name}" in entry for entry in entries)}
    count = min(len(entries), MOST_LOG_ROWS)
    shown = [entries[round(index * (len(entries) - 1) / max(count - 1, 1))] for index in range(count)]
    return _table(list(fields), [[entry.get(field) for field in fields.values()] for entry in shown])


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_figure(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return ""
    return str(getattr(value, "value", value))
