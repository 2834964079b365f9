"""Figures of a benchmark, drawn from its rows alone: speed-up, acceptance by position, the time in a round.

They stand on a light card of their own, so that they read on light and dark pages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_domino.benchmark.methods import BASELINE
from hf_domino.benchmark.report import label, methods_of, modes_of
from hf_domino.benchmark.rows import Row
from hf_domino.benchmark.summary import FORWARDS, Summary, summarize

CARD, PANEL, INK, FAINT = "#f6f8fa", "#ffffff", "#24292f", "#d0d7de"
OURS, OTHERS = "#2f8a45", "#8c959f"
LINES = ("#8c959f", "#3b74b8", "#a9802f", "#8250df", "#bf3989", "#2f8a45")
PHASE_COLOURS = {
    "target_forward": "#3b74b8",
    "draft": "#a9802f",
    "rollout": "#2f8a45",
    "verify": "#c0483c",
    "rest": "#8c959f",
}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hf_domino",  # the same rows give the same file
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": PANEL,
    "figure.facecolor": CARD,
    "savefig.facecolor": CARD,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def draw_figures(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every figure that the rows have the data for.

    Args:
        rows (`Sequence[Row]`): Rows of one run.
        folder (`Path`): Where to write the SVG files; made if it is not there.

    Returns:
        `list[Path]`: `speed-up.svg`, `acceptance.svg` and `round.svg`, as far as they were drawn.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "--figures needs matplotlib, which is not installed: pip install 'hf-domino[figures]'."
        ) from error
    summaries = {
        (mode, method): summarize(rows, method, mode) for mode in modes_of(rows) for method in methods_of(rows)
    }
    drawings: dict[str, Callable[[Sequence[Row], dict], Any]] = {
        "speed-up.svg": _draw_speed_up,
        "acceptance.svg": _draw_acceptance,
        "round.svg": _draw_round,
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw(rows, summaries)
            if figure is not None:
                figure.savefig(folder / name, metadata={"Date": None})
                paths.append(folder / name)
    return paths


def _name(method: str) -> str:
    return label(method).replace("*", "").replace("`", "")


def _panels(rows: Sequence[Row], width: float, height: float, **options: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """A figure with a panel for each mode: the figure, and mode and axes of each."""
    from matplotlib.figure import Figure

    modes = modes_of(rows)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(modes), squeeze=False, **options)[0]
    for panel, name in zip(axes, modes.values(), strict=True):
        panel.set_title(name, loc="left", fontsize=12)
    return figure, list(zip(modes, axes, strict=True))


def _draw_speed_up(rows: Sequence[Row], summaries: dict[tuple[str, str], Summary]) -> Any:
    methods = methods_of(rows)
    figure, panels = _panels(rows, 10, 1.4 + 0.42 * len(methods), sharey=True)
    for mode, axes in panels:
        plain = summaries[mode, BASELINE].tokens_per_second
        for place, method in enumerate(methods):
            summary = summaries[mode, method]
            spread = summary.quartiles or (summary.tokens_per_second,) * 2
            ends = [end / plain for end in spread]
            colour = OURS if summary.ms_per_round or method == methods[-1] else OTHERS
            axes.barh(place, summary.speed_up, height=0.62, color=colour)
            axes.plot(ends, [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
            axes.annotate(
                f"{summary.speed_up:.2f} x",
                (max(*ends, summary.speed_up), place),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
            )
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(methods)), [_name(method) for method in methods])
        axes.set_ylim(len(methods) - 0.4, -0.6)
        axes.margins(x=0.18)
        axes.set_xlim(left=0)
        axes.set_xlabel("speed-up over plain generate; line: quartiles")
    return figure


def _draw_acceptance(rows: Sequence[Row], summaries: dict[tuple[str, str], Summary]) -> Any:
    methods = [method for method in methods_of(rows) if any(_rates(summaries, mode, method) for mode in modes_of(rows))]
    if not methods:
        return None
    figure, panels = _panels(rows, 10, 4.2, sharey=True)
    colours = dict(zip(methods, LINES[-len(methods) :], strict=False))
    for mode, axes in panels:
        for method in methods:
            rates = _rates(summaries, mode, method)
            if rates:
                name = f"{_name(method)}: {summaries[mode, method].acceptance_length:.2f} tokens a round"
                axes.plot(
                    range(1, len(rates) + 1), rates, color=colours[method], marker="o", markersize=3.5, label=name
                )
        axes.set_xlabel("position in the draft")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
        axes.legend(loc="upper right")
    panels[0][1].set_ylabel("share of rounds that accept it")
    return figure


def _rates(summaries: dict[tuple[str, str], Summary], mode: str, method: str) -> list[float]:
    return summaries[mode, method].acceptance_rate_at


def _draw_round(rows: Sequence[Row], summaries: dict[tuple[str, str], Summary]) -> Any:
    bars = {key: summary for key, summary in summaries.items() if summary.ms_per_round}
    if not bars:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.7 + 0.5 * len(bars)), layout="constrained")
    axes = figure.subplots()
    names = modes_of(rows)
    for place, summary in enumerate(bars.values()):
        left = 0.0
        for phase, colour in PHASE_COLOURS.items():
            width = summary.ms_per_round.get(phase, 0.0)
            text = phase.replace("_", " ") if place == 0 else None
            axes.barh(place, width, left=left, height=0.6, color=colour, label=text)
            left += width
        axes.annotate(
            f"{left:.1f} ms, {100 * (summary.overhead or 0):.1f} % outside",
            (left, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(bars)), [f"{_name(method)}, {names[mode]}" for mode, method in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    outside = " and ".join(name for name in PHASE_COLOURS if name not in FORWARDS)
    axes.set_xlabel(f"milliseconds a round; outside: {outside}")
    axes.legend(ncols=len(PHASE_COLOURS), loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure
