"""Figures of a study, drawn from the rows of one budget alone, in the style of the benchmark's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from figures import FAINT, INK, WIDTH, draw
from hf_domino.evaluation.results import Result
from study.plan import BASE, Study
from study.summary import Summary, conditional_rates, summarize

BETTER, WORSE, SAME, REFERENCE = "#2f8a45", "#c0483c", "#6e7781", "#3b74b8"
LINES = ("#3b74b8", "#cf6f1e", "#bf3989", "#2f8a45", "#8250df", "#a9802f", "#14532d", "#6e7781")
Mark = tuple[str, tuple[float, float], str]  # name, place in data coordinates, colour
SHAPES = {
    "gru_hidden_dim": "width of the prefix state",
    "emb_dim": "rank of the head",
    "num_hidden_layers": "backbone layers",
    "target_layer_ids": "captured layers",
}
FEWEST_ROUNDS = 100  # a share of so many is known to 0.1, two standard errors; of fewer it says little
LABEL_DISTANCES, LABEL_ANGLES = range(6, 150, 6), 24  # points from a mark to its name, tried from near to far
OBSTACLE, BESIDE = 3, 6  # half a mark's width in points; beyond that distance a line leads from a name to its mark


def make_figures(study: Study, rows: Sequence[Result]) -> dict[str, Any]:
    """Draw every figure that the rows have the data for.

    Returns:
        `dict[str, matplotlib.figure.Figure]`: `variants`, `positions` and, where shapes were varied, `size`.
    """
    summaries = summarize(study, rows)
    return draw(
        {
            "variants": lambda: _draw_variants(summaries, rows),
            "positions": lambda: _draw_positions(summaries, rows),
            "size": lambda: _draw_size(study, summaries),
        }
    )


def colour_of(summary: Summary) -> str:
    """Better or worse by more than chance, or neither; the base has a colour of its own."""
    if summary.variant == BASE:
        return REFERENCE
    if summary.difference is None or not summary.difference.is_clear:
        return SAME
    return BETTER if summary.difference.mean > 0 else WORSE


def _figure(height: float, columns: int = 1) -> tuple[Any, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns, squeeze=False)[0]


def _draw_variants(summaries: Sequence[Summary], rows: Sequence[Result]) -> Any:
    """A line a variant: runs as dots, their mean as a bar, and in grey what it is compared with, as wide as chance."""
    figure, (axes,) = _figure(1.2 + 0.34 * len(summaries))
    means = {summary.variant: summary.acceptance_length for summary in summaries}
    for place, summary in enumerate(summaries):
        colour, difference = colour_of(summary), summary.difference
        if difference is not None and difference.error is not None:
            middle = means[difference.against]
            axes.barh(place, 2 * difference.error, left=middle - difference.error, height=0.7, color=FAINT, alpha=0.6)
            axes.plot([middle, middle], [place - 0.35, place + 0.35], color=SAME, linewidth=0.8)
        lengths = [row["acceptance_length"] for row in rows if row.method == summary.variant]
        axes.plot(lengths, [place] * len(lengths), "o", color=colour, markersize=4.5, alpha=0.65, markeredgewidth=0)
        axes.plot([means[summary.variant]] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2.4)
    axes.set_yticks(range(len(summaries)), [summary.variant for summary in summaries])
    axes.set_ylim(len(summaries) - 0.4, -0.6)
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("acceptance length; grey: what it is compared with, and what chance explains")
    return figure


def _draw_positions(summaries: Sequence[Summary], rows: Sequence[Result]) -> Any:
    """Acceptance by position of the variants with several seeds, of all rounds and of those that came so far."""
    core = [summary for summary in summaries if len(summary.seeds) > 1] or list(summaries)
    figure, panels = _figure(4.4, columns=2)
    for summary, colour in zip(core, LINES, strict=False):
        for axes, rates in zip(panels, (summary.acceptance_rate_at, rates_so_far(summary, rows)), strict=True):
            places = range(1, len(rates) + 1)
            axes.plot(places, rates, color=colour, marker="o", markersize=3.5, label=summary.variant)
    so_far = f"share of rounds that came so far ({FEWEST_ROUNDS} or more)"
    for axes, text in zip(panels, ("share of all rounds", so_far), strict=True):
        axes.set_title(text, loc="left", fontsize=12)
        axes.set_xlabel("position in the draft")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
    panels[0].set_ylabel("accepted")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def rates_so_far(summary: Summary, rows: Sequence[Result]) -> list[float]:
    """Shares among the rounds that came to a position, up to the last that `FEWEST_ROUNDS` came to."""
    num_rounds = sum(row["num_rounds"] for row in rows if row.method == summary.variant)
    came = [num_rounds * rate for rate in (1.0, *summary.acceptance_rate_at)]
    rates = conditional_rates(summary.acceptance_rate_at)
    return [rate for rate, count in zip(rates, came, strict=False) if count >= FEWEST_ROUNDS]


def _draw_size(study: Study, summaries: Sequence[Summary]) -> Any:
    """Acceptance against parameters where one number of the shape was changed; None where none was."""
    by_name = {summary.variant: summary for summary in summaries}
    groups: dict[str, list[Summary]] = {}
    for name, summary in by_name.items():
        if len(changed := list(study.variants[name].described())) == 1 and changed[0] in SHAPES:
            groups.setdefault(changed[0], []).append(summary)
    if not groups or BASE not in by_name:
        return None
    figure, (axes,) = _figure(4.6)
    marks: list[Mark] = []
    for (field, group), colour in zip(groups.items(), LINES[1:], strict=False):
        ordered = sorted([*group, by_name[BASE]], key=lambda summary: summary.figures["parameters"])
        sizes = [summary.figures["parameters"] / 1e6 for summary in ordered]
        lengths = [summary.acceptance_length for summary in ordered]
        axes.plot(sizes, lengths, color=colour, marker="o", markersize=4, label=SHAPES[field])
        marks += [
            (summary.variant, (size, summary.acceptance_length), colour)
            for summary, size in zip(ordered, sizes, strict=True)
            if summary.variant != BASE
        ]
    base = by_name[BASE]
    axes.plot(base.figures["parameters"] / 1e6, base.acceptance_length, "o", color=INK, markersize=7, label="the base")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_xlabel("millions of parameters")
    axes.set_ylabel("acceptance length")
    figure.legend(loc="outside lower center", ncols=5)
    name_marks(axes, marks, fontsize=9)
    return figure


def name_marks(axes: Any, marks: Sequence[Mark], fontsize: float = 8) -> None:
    """Write names where they lie over no line, no mark and no other name: beside their marks, or led to them."""
    axes.figure.draw_without_rendering()  # places are known once the figure is laid out
    scale = axes.figure.dpi / 72
    taken = _obstacles(axes, OBSTACLE * scale)
    for name, place, colour in marks:
        measured = axes.text(0, 0, name, fontsize=fontsize)
        box = measured.get_window_extent()
        measured.remove()
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": OBSTACLE, "alpha": 0.7}
        for distance, offset in _offsets(box.width / scale, box.height / scale):
            leader = line if distance > BESIDE else None
            middle = axes.transData.transform(place) + [scale * shift for shift in offset]
            here = type(box).from_bounds(*(middle - [box.width / 2, box.height / 2]), box.width, box.height)
            is_inside = axes.bbox.contains(*here.min) and axes.bbox.contains(*here.max)
            if is_inside and not any(here.overlaps(other) for other in taken):
                break
        taken.append(here)
        text = {"xytext": offset, "textcoords": "offset points", "ha": "center", "va": "center", "color": colour}
        axes.annotate(name, place, fontsize=fontsize, arrowprops=leader, **text)


def _offsets(width: float, height: float) -> Iterator[tuple[float, tuple[float, float]]]:
    """Distances of a name of this size, from near to far, and where its middle is then, all around, in points."""
    for distance in LABEL_DISTANCES:
        for step in range(LABEL_ANGLES):
            angle = 2 * math.pi * step / LABEL_ANGLES
            across, up = math.cos(angle), math.sin(angle)
            yield distance, (across * (distance + width / 2), up * (distance + height / 2))


def _obstacles(axes: Any, half: float) -> list[Any]:
    """Boxes along every line of these axes, marks included, in pixels."""
    boxes = []
    for line in axes.get_lines():
        ends = axes.transData.transform(line.get_xydata())
        for start, end in zip(ends, [*ends[1:], ends[-1]], strict=True):
            count = 1 + int(max(abs(end - start)) / half)
            for step in range(count):
                x, y = start + (end - start) * step / count
                boxes.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    return boxes
