"""Draw pictures of the speed and the acceptance of every method from results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_domino.evaluation.benchmark.report import methods_of, modes_of, plain_label
from hf_domino.evaluation.benchmark.summary import summarize
from hf_domino.evaluation.results import Result


def check_matplotlib() -> None:
    """Raise a `ValueError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--figures needs matplotlib: pip install 'hf-domino[figures]', or leave it out.") from error


def write_figures(rows: Sequence[Result], folder: Path) -> list[Path]:
    """Write `speed.svg` and `acceptance.svg`, with a panel for each mode, and return their paths."""
    from matplotlib.figure import Figure

    modes = modes_of(rows)
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in {"speed": _draw_speed, "acceptance": _draw_acceptance}.items():
        figure = Figure(figsize=(6 * len(modes), 4), layout="constrained")
        panels = figure.subplots(1, len(modes), squeeze=False)[0]
        for axes, (mode, title) in zip(panels, modes.items(), strict=True):
            axes.set_title(title)
            draw(axes, {plain_label(method): summarize(rows, method, mode) for method in methods_of(rows)})
        paths.append(folder / f"{name}.svg")
        figure.savefig(paths[-1], metadata={"Date": None})
    return paths


def _draw_speed(axes: Any, summaries: dict[str, Any]) -> None:
    """Draw a bar for each method, the first one on top, and a line at the speed of plain generation."""
    bars = axes.barh(list(summaries), [one.speed_up for one in summaries.values()])
    axes.bar_label(bars, fmt="%.2f x", padding=4)
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over plain generate")


def _draw_acceptance(axes: Any, summaries: dict[str, Any]) -> None:
    """Draw a line for each method: the share of rounds that accepted each position."""
    for label, one in summaries.items():
        if one.acceptance_rate_at:
            axes.plot(range(1, len(one.acceptance_rate_at) + 1), one.acceptance_rate_at, marker="o", label=label)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("share of rounds that accept it")
    if axes.lines:
        axes.legend()
