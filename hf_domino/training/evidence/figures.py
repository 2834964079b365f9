"""The picture of a training, drawn from its log alone: losses, acceptance, and acceptance by draft position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from hf_domino._common.figures import EXTRA, FAINT, STYLE, WIDTH, can_draw, write_figure
from hf_domino._common.notices import notice
from hf_domino.cards.training import FIGURE

HEAD, BASE, QUIET = "#14532d", "#3b74b8", "#8c959f"
DOTS = {"marker": "o", "markersize": 3.5}


def draw_training(log: Sequence[Mapping[str, Any]], folder: Path) -> str | None:
    """Write the figure of a trainer's `log_history`; its path from the drafter's folder, None where there is none."""
    steps = pd.DataFrame([entry for entry in log if "base_loss" in entry])
    if steps.empty:
        return None
    if not can_draw():
        _say_once(f"matplotlib is not installed, so no figure of the training is drawn: {EXTRA}.")
        return None
    import matplotlib

    with matplotlib.rc_context(STYLE):
        write_figure(_draw(steps, pd.DataFrame([entry for entry in log if "eval_loss" in entry])), folder / FIGURE)
    return FIGURE


@cache
def _say_once(message: str) -> None:
    notice(message)


def _draw(steps: pd.DataFrame, evaluations: pd.DataFrame) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    by_position = {
        prefix: [evaluations[name].iloc[-1] for name in evaluations if name.startswith(f"{prefix}accept_at_")]
        for prefix in ("eval_base_", "eval_")
    }
    panels = figure.subplots(1, 3 if any(by_position.values()) else 2)
    # Lines of the loss that is trained; of held-out text alone where that was measured more than once: both in one
    # panel would compare two different losses.
    is_evaluated = len(evaluations) > 1
    _title(panels[0], f"loss {'of held-out text' if is_evaluated else 'that is trained'}", "step")
    for name, colour in (("base_loss", BASE), ("corrected_loss", HEAD)):
        if is_evaluated:
            _plot(panels[0], evaluations, f"eval_{name}", color=colour, **DOTS)
        else:
            _plot_mean(panels[0], steps, name, colour)
    _title(panels[1], "tokens a round", "step")
    _plot_mean(panels[1], steps, "acceptance_length", HEAD)
    kind = "walked_" if "eval_walked_acceptance_length" in evaluations else ""
    _plot(panels[1], evaluations, f"eval_base_{kind}acceptance_length", color=BASE, **DOTS)
    _plot(panels[1], evaluations, f"eval_{kind}acceptance_length", color=HEAD, **DOTS)
    panels[1].set_ylim(bottom=1)  # a round without drafts
    if len(panels) == 3:
        _title(panels[2], "right, if all before are", f"position in the draft, step {evaluations['step'].iloc[-1]:,}")
        for rates, colour in zip(by_position.values(), (BASE, HEAD), strict=True):
            panels[2].plot(range(1, len(rates) + 1), rates, color=colour, **DOTS)
        panels[2].set_ylim(0, 1)
    panels[0].plot([], [], color=BASE, label="base logits")
    panels[0].plot([], [], color=HEAD, label="as drafted")
    panels[0].plot([], [], color=QUIET, label="dots: held-out text", **DOTS)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _title(axes: Any, title: str, below: str) -> None:
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlabel(below)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _plot(axes: Any, entries: pd.DataFrame, name: str, **style: Any) -> None:
    if name in entries:
        points = entries[["step", name]].dropna()
        axes.plot(points["step"], points[name], **style)


def _plot_mean(axes: Any, entries: pd.DataFrame, name: str, colour: str) -> None:
    """What was logged, faint, and its running mean over a tenth of the training: single batches differ a lot."""
    _plot(axes, entries, name, color=colour, alpha=0.2, linewidth=1)
    if name in entries:
        mean = entries[["step"]].assign(
            **{name: entries[name].rolling(len(entries) // 20 * 2 + 1, 1, center=True).mean()}
        )
        _plot(axes, mean, name, color=colour, linewidth=1.6)
