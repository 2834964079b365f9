"""The looks that all figures share, and how they are written: text stays text, and the same data give the same file.

They stand on a light card of their own, so that they read on light and dark pages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WIDTH = 10  # inches
CARD, PANEL, INK, FAINT = "#f6f8fa", "#ffffff", "#24292f", "#d0d7de"
EXTRA = "pip install matplotlib"
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


def can_draw() -> bool:
    """Say whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(drawings: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Draw figures in the common style; one that is None for want of data is left out."""
    if not can_draw():
        raise ValueError(f"Figures need matplotlib, which is not installed: {EXTRA}.")
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figures = {name: make() for name, make in drawings.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def write_figures(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write figures by their names as SVG files into a folder, which is made, and return the files."""
    paths = [folder / f"{name}.svg" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        write_figure(figure, path)
    return paths


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure as an SVG file that says nothing of when it was drawn; its folder is made."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None})
