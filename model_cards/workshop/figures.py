"""The pictures of cards, pages and notebooks, drawn from rows alone: `python model_cards/workshop figures ROWS FOLDER`.

Of a benchmark these are the speed-up, acceptance by position, and the time in a round. All pictures stand on a light
card of their own, so that they read on light and dark pages alike; text stays text, and the same rows give the same
file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from hf_domino._common.errors import invalid_argument
from hf_domino.evaluation.benchmark.options import BASELINE, METHODS
from hf_domino.evaluation.benchmark.report import methods_of, modes_of, plain_label
from hf_domino.evaluation.benchmark.summary import Summary, speed_ups_of, summarize
from hf_domino.evaluation.results import Result, measured, read_results

EXAMPLES = """\
  python model_cards/workshop figures model_cards/pycoder-13m-domino/results.jsonl docs/benchmark
"""
WIDTH = 10  # inches
CARD, PANEL, INK, FAINT = "#f6f8fa", "#ffffff", "#24292f", "#d0d7de"
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
# One a method, in the order of `METHODS`.
COLOURS = (
    *("#afb8c1", "#8c959f", "#6e7781", "#bf3989", "#a40e26", "#e85aad", "#f08c8c", "#8250df"),
    *("#cf6f1e", "#14a3c7", "#c9a227", "#7fb0e6", "#3b74b8", "#7cc48c", "#14532d"),
    "#0d9488",
)
# Drafters that are compared: by kind, chains dark and trees light; then those of further drafters.
KIND_COLOURS = {
    "(Domino)": ("#14532d", "#7cc48c"),
    "(DFlash)": ("#3b74b8", "#7fb0e6"),
    "(EAGLE-3)": ("#6d28d9", "#b79df2"),
}
PHASE_COLOURS = {
    "target_forward": "#3b74b8",
    "draft": "#a9802f",
    "correction": "#2f8a45",
    "verify": "#c0483c",
    "rest": "#8c959f",
}
OVERHEAD = ("verify", "rest")  # phases beside the forwards and the correction, which every round needs
Summaries = dict[tuple[str, str], Summary]  # of mode and method


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the rows and the folder."""
    parser.add_argument("rows", type=Path, metavar="ROWS", help="rows of `hf-domino bench`")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where SVG files are written")


def run(options: argparse.Namespace) -> None:
    """Draw the rows of a benchmark."""
    print(*write_figures(make_figures(read_results(options.rows)), options.folder), sep="\n")


def draw(drawings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Draw figures in the common style; one that is None for want of data is left out."""
    with matplotlib.rc_context(STYLE):
        figures = {name: make() for name, make in drawings.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def write_figures(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write figures by their names as SVG files, which do not say when they were drawn, into a folder; it is made."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in figures]
    with matplotlib.rc_context(STYLE):
        for path, figure in zip(paths, figures.values(), strict=True):
            figure.savefig(path, metadata={"Date": None})
    return paths


def make_figures(rows: Sequence[Result]) -> dict[str, Any]:
    """Draw every figure that the rows have the data for, by its name: `speed-up`, `acceptance` and `round`."""
    if not all("seconds_each" in row for row in measured(rows)):
        raise invalid_argument(
            "ROWS", "those of `hf-domino bench`", "others", "Of a GPU `tables` makes a table in docs/gpu.md."
        )
    summaries = {
        (mode, method): summarize(rows, method, mode) for mode in modes_of(rows) for method in methods_of(rows)
    }
    drawings = {"speed-up": _draw_speed_up, "acceptance": _draw_acceptance, "round": _draw_round}
    return draw({name: partial(make, rows, summaries) for name, make in drawings.items()})


def colour_of(method: str) -> str:
    """The colour of one of `METHODS` in every figure."""
    return COLOURS[list(METHODS).index(method)]


def colours_of(rows: Sequence[Result]) -> dict[str, str]:
    """The colour of each method; that of a compared drafter tells its kind, as far as these suffice."""
    found: dict[str, str] = {}
    for method in methods_of(rows):
        own = [colour_of(method)] if method in METHODS else []
        own += [colour for kind, colours in KIND_COLOURS.items() if kind in method for colour in colours]
        found[method] = next((colour for colour in (*own, *COLOURS) if colour not in found.values()), INK)
    return found


def _panels(rows: Sequence[Result], height: float) -> tuple[Any, list[tuple[str, Any]]]:
    """A figure with a panel for each mode: the figure, and mode and axes of each."""
    modes = modes_of(rows)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, len(modes), squeeze=False, sharey=True)[0]
    for panel, name in zip(axes, modes.values(), strict=True):
        panel.set_title(name, loc="left", fontsize=12)
    return figure, list(zip(modes, axes, strict=True))


def _draw_speed_up(rows: Sequence[Result], summaries: Summaries) -> Any:
    """Bars of the speed-up over plain generation, with quartiles over prompts and a line at 1."""
    methods = methods_of(rows)
    figure, panels = _panels(rows, 1.4 + 0.42 * len(methods))
    for mode, axes in panels:
        for place, (method, colour) in enumerate(colours_of(rows).items()):
            mean = summaries[mode, method].speed_up
            ratios = speed_ups_of(rows, method, BASELINE, mode)
            first, _, third = statistics.quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
            axes.barh(place, mean, height=0.62, color=colour)
            axes.plot([first, third], [place, place], color=INK, linewidth=1.2, solid_capstyle="butt")
            _write_beside(axes, max(third, mean), place, f"{mean:.2f} x")
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        _list_bars(axes, [plain_label(method) for method in methods], room=0.25)
        axes.set_xlabel("speed-up over plain generate; line: quartiles of the prompts")
    return figure


def _draw_acceptance(rows: Sequence[Result], summaries: Summaries) -> Any:
    """Lines of the share of rounds that accepted each position; None where no method has rounds."""
    if not any(summary.acceptance_rate_at for summary in summaries.values()):
        return None
    figure, panels = _panels(rows, 4.6)
    for mode, axes in panels:
        for method, colour in colours_of(rows).items():
            if rates := summaries[mode, method].acceptance_rate_at:
                places = range(1, len(rates) + 1)
                axes.plot(places, rates, color=colour, marker="o", markersize=3.5, label=plain_label(method))
        axes.set_xlabel("position in the draft")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
    panels[0][1].set_ylabel("share of rounds that accept it")
    figure.legend(*panels[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_round(rows: Sequence[Result], summaries: Summaries) -> Any:
    """Bars of the time in a round, phase by phase; None where no method has phases."""
    bars = {key: summary for key, summary in summaries.items() if summary.ms_per_round}
    if not bars:
        return None
    figure = Figure(figsize=(WIDTH, 1.7 + 0.5 * len(bars)), layout="constrained")
    axes, names = figure.subplots(), modes_of(rows)
    for place, summary in enumerate(bars.values()):
        end = 0.0
        for phase, colour in PHASE_COLOURS.items():
            text = phase.replace("_", " ") if place == 0 else None
            axes.barh(place, summary.ms_per_round[phase], left=end, height=0.6, color=colour, label=text)
            end += summary.ms_per_round[phase]
        outside = sum(summary.ms_per_round[phase] for phase in OVERHEAD) / end
        _write_beside(axes, end, place, f"{end:.1f} ms, {100 * outside:.1f} % outside")
    _list_bars(axes, [f"{plain_label(method)}, {names[mode]}" for mode, method in bars], room=0.35)
    axes.set_xlabel(f"milliseconds a round; outside: {' and '.join(OVERHEAD)}")
    figure.legend(loc="outside upper center", ncols=len(PHASE_COLOURS))
    return figure


def _write_beside(axes: Any, end: float, place: int, text: str) -> None:
    axes.annotate(text, (end, place), xytext=(6, 0), textcoords="offset points", va="center")


def _list_bars(axes: Any, names: Sequence[str], room: float) -> None:
    """Name horizontal bars, the first on top, with room for what is written beside them."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=room)
    axes.set_xlim(left=0)
