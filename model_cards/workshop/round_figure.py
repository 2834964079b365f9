"""The picture of an opened round: its proposals with their chances, the target's choices, and the path it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from figures import FAINT, INK, PHASE_COLOURS, WIDTH, draw
from hf_domino.evaluation.explain import Round

KEPT, MISSED, OWN = (PHASE_COLOURS[name] for name in ("correction", "verify", "target_forward"))
LINE_HEIGHT = 0.52  # inches


def draw_round(opened: Round, show: Callable[[int], str] = str) -> Any:
    """Draw a round: kept tokens are green, wrong ones behind these red, and what stands behind a wrong one grey.

    Under a proposal stands its chance to be accepted with all before it, and in blue the target's own choice behind it,
    where the path does not show it.

    Args:
        opened ([`Round`]): The round.
        show (`Callable`, *optional*): The text of a token id.

    Returns:
        `matplotlib.figure.Figure`: The picture.
    """
    return draw({"round": lambda: _draw(opened, show)})["round"]


def _draw(opened: Round, show: Callable[[int], str]) -> Any:
    figure, path, places = Figure(layout="constrained"), opened.path, dict[int, tuple[int, int]]()
    axes = figure.subplots()
    line = last = 0
    for position, depth in opened.walk():
        # The likeliest child goes on in its parent's line, others take new ones.
        line += 0 < depth <= last
        places[position], last = (depth, line), depth
        parent = int(opened.parents[position - 1]) if position else 0
        is_kept = position in path
        if position:
            before_and_here = zip(places[parent], places[position], strict=True)
            axes.plot(*before_and_here, color=KEPT if is_kept else FAINT, zorder=1 + is_kept)
        colour = INK if not position else KEPT if is_kept else MISSED if parent in path else FAINT
        box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "round,pad=0.3"}
        ink, kind = INK if colour == FAINT else "white", dict[str, Any](family="monospace", va="center")
        token = int(opened.proposals[position - 1]) if position else opened.anchor
        axes.text(depth, line, show(token), color=ink, fontsize=10, bbox=box, zorder=3, ha="center", **kind)
        if position and opened.chances is not None:
            chance = f"{opened.chances[position - 1]:.0%}"
            axes.text(depth, line + 0.42, chance, fontsize=8, ha="right", va="center")
        if position == path[-1] or not is_kept:
            choice = f" → {show(int(opened.choices[position]))}"
            axes.text(depth, line + 0.42, choice, fontsize=8, color=OWN, weight="bold" if is_kept else "normal", **kind)
    deepest = max(depth for depth, _ in places.values())
    figure.set_size_inches(WIDTH, LINE_HEIGHT * (line + 1.4))
    axes.set(xlim=(-0.5, max(deepest, 3) + 0.5), ylim=(line + 0.7, -0.5))
    axes.set_axis_off()
    return figure
