"""The picture of an opened round: its proposals with their chances, the target's choices, and the path it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_domino._common.figures import FAINT, INK, WIDTH, draw
from hf_domino.evaluation.benchmark.figures import PHASE_COLOURS
from hf_domino.evaluation.explain import Round

KEPT, MISSED, OWN = (PHASE_COLOURS[name] for name in ("rollout", "verify", "target_forward"))
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

    Raises:
        ValueError: If matplotlib is not installed.
    """
    return draw({"round": lambda: _draw(opened, show)})["round"]


def _draw(opened: Round, show: Callable[[int], str]) -> Any:
    from matplotlib.figure import Figure

    places = _places(opened)
    deepest, lowest = (max(values) for values in zip(*places.values(), strict=True))
    figure = Figure(figsize=(WIDTH, LINE_HEIGHT * (lowest + 1.4)), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(-0.5, max(deepest, 3) + 0.5), ylim=(lowest + 0.7, -0.5))
    axes.set_axis_off()
    for position, place in places.items():
        _draw_position(axes, opened, position, place, show)
        if position:
            before = places[int(opened.parents[position - 1])]
            is_kept = position in opened.path
            axes.plot(*zip(before, place, strict=True), color=KEPT if is_kept else FAINT, zorder=1 + is_kept)
    return figure


def _places(opened: Round) -> dict[int, tuple[int, int]]:
    """Column and line of each position: the likeliest child goes on in its parent's line, others take new ones."""
    places: dict[int, tuple[int, int]] = {}
    line = last = 0
    for position, depth in opened.walk():
        line += 0 < depth <= last
        places[position], last = (depth, line), depth
    return places


def _draw_position(axes: Any, opened: Round, position: int, place: tuple[int, int], show: Callable[[int], str]) -> None:
    path, token = opened.path, int(opened.proposals[position - 1]) if position else opened.anchor
    colour = KEPT if position in path else MISSED if int(opened.parents[position - 1]) in path else FAINT
    colour = colour if position else INK
    box = {"facecolor": colour, "edgecolor": "none", "boxstyle": "round,pad=0.3"}
    ink, kind = INK if colour == FAINT else "white", {"family": "monospace", "ha": "center", "va": "center"}
    axes.text(*place, show(token), color=ink, fontsize=10, bbox=box, zorder=3, **kind)
    if position and opened.chances is not None:
        axes.text(place[0], place[1] + 0.42, f"{opened.chances[position - 1]:.0%}", fontsize=8, ha="right", va="center")
    if position == path[-1] or position not in path:
        choice = f" → {show(int(opened.choices[position]))}"
        weight = "bold" if position in path else "normal"
        axes.text(place[0], place[1] + 0.42, choice, fontsize=8, color=OWN, weight=weight, **kind | {"ha": "left"})
