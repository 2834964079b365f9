"""The picture of a training, drawn from its log alone: losses, acceptance, and acceptance by draft position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_domino._common.figures import EXTRA, FAINT, STYLE, WIDTH, can_draw, write_figure
from hf_domino._common.notices import notice
from hf_domino.cards.training import FIGURE

HEAD, BASE, QUIET = "#14532d", "#3b74b8", "#8c959f"
NO_MATPLOTLIB = f"matplotlib is not installed, so no figure of the training is drawn: {EXTRA}."
Log = Sequence[Mapping[str, Any]]


def draw_training(log: Log, folder: Path) -> str | None:
    """Write the figure of a training; without matplotlib, say so and write none.

    Args:
        log (`Sequence[Mapping]`): The trainer's `log_history`.
        folder (`Path`): The drafter's.

    Returns:
        `str`, *optional*: Where it is, from the folder; None if there is none.
    """
    steps = [entry for entry in log if "base_loss" in entry]
    if not steps:
        return None
    if not can_draw():
        _say_once(NO_MATPLOTLIB)
        return None
    import matplotlib

    with matplotlib.rc_context(STYLE):
        write_figure(_draw(steps, [entry for entry in log if "eval_loss" in entry]), folder / FIGURE)
    return FIGURE


@cache
def _say_once(message: str) -> None:
    notice(message)


def _draw(steps: Log, evaluations: Log) -> Any:
    from matplotlib.figure import Figure

    by_position = _by_position(evaluations)
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    panels = figure.subplots(1, 3 if by_position else 2)
    _draw_losses(panels[0], steps, evaluations)
    _draw_lengths(panels[1], steps, evaluations)
    if by_position:
        _draw_positions(panels[2], by_position, evaluations[-1]["step"])
    for axes in panels:
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.xaxis.get_major_locator().set_params(integer=True)
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    return figure


def _draw_losses(axes: Any, steps: Log, evaluations: Log) -> None:
    """Lines of the loss that is trained; of held-out text alone where that was measured more than once."""
    if len(evaluations) > 1:  # both in one panel would compare two different losses
        axes.set_title("loss of held-out text", loc="left", fontsize=12)
        _plot(axes, evaluations, "eval_base_loss", color=BASE, marker="o", markersize=3.5)
        _plot(axes, evaluations, "eval_loss", color=HEAD, marker="o", markersize=3.5)
    else:
        axes.set_title("loss that is trained", loc="left", fontsize=12)
        _plot_mean(axes, steps, "base_loss", BASE)
        _plot_mean(axes, steps, "corrected_loss", HEAD)
    axes.plot([], [], color=BASE, label="base logits")
    axes.plot([], [], color=HEAD, label="as drafted")
    axes.plot([], [], color=QUIET, marker="o", markersize=3.5, label="dots: held-out text")
    axes.set_xlabel("step")


def _draw_lengths(axes: Any, steps: Log, evaluations: Log) -> None:
    _plot_mean(axes, steps, "acceptance_length", HEAD)
    kind = "walked_" if any("eval_walked_acceptance_length" in entry for entry in evaluations) else ""
    _plot(axes, evaluations, f"eval_base_{kind}acceptance_length", color=BASE, marker="o", markersize=3.5)
    _plot(axes, evaluations, f"eval_{kind}acceptance_length", color=HEAD, marker="o", markersize=3.5)
    axes.set_ylim(bottom=1)  # a round without drafts
    axes.set_title("tokens a round", loc="left", fontsize=12)
    axes.set_xlabel("step")


def _plot_mean(axes: Any, entries: Log, name: str, colour: str) -> None:
    """What was logged, faint, and its running mean over a tenth of the training: single batches differ a lot."""
    _plot(axes, entries, name, color=colour, alpha=0.2, linewidth=1)
    points = [entry for entry in entries if name in entry]
    half = len(points) // 20
    windows = [points[max(place - half, 0) : place + half + 1] for place in range(len(points))]
    means = [
        {"step": at["step"], name: fmean(entry[name] for entry in near)}
        for at, near in zip(points, windows, strict=True)
    ]
    _plot(axes, means, name, color=colour, linewidth=1.6)


def _draw_positions(axes: Any, by_position: Mapping[str, Sequence[float]], step: int) -> None:
    for prefix, colour in (("eval_base_", BASE), ("eval_", HEAD)):
        if rates := by_position.get(prefix):
            axes.plot(range(1, len(rates) + 1), rates, color=colour, marker="o", markersize=3.5)
    axes.set_ylim(0, 1)
    axes.set_title("right, if all before are", loc="left", fontsize=12)
    axes.set_xlabel(f"position in the draft, step {step:,}")


def _plot(axes: Any, entries: Log, name: str, **style: Any) -> None:
    points = [(entry["step"], entry[name]) for entry in entries if name in entry]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def _by_position(evaluations: Log) -> dict[str, list[float]]:
    """Shares by draft position of the last evaluation, of base and corrected logits, as far as it has them."""
    last = evaluations[-1] if evaluations else {}
    found: dict[str, list[float]] = {}
    for prefix in ("eval_base_", "eval_"):
        while (name := f"{prefix}accept_at_{len(found.get(prefix, ())) + 1}") in last:
            found.setdefault(prefix, []).append(last[name])
    return found
