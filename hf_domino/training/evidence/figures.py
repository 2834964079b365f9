"""The picture of a training, drawn from its log alone: losses, acceptance, and acceptance by draft position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hf_domino._common.figures import EXTRA, FAINT, STYLE, WIDTH, can_draw, write_figure
from hf_domino._common.notices import logger
from hf_domino.cards.training import FIGURE

COLOURS = {"base_": "#3b74b8", "": "#14532d"}  # of base logits, and as drafted
DOTS = {"marker": "o", "markersize": 3.5}


def draw_training(history: Sequence[Mapping[str, Any]], folder: Path) -> str | None:
    """Write the figure of a trainer's `log_history`; its path from the drafter's folder, None where there is none."""
    if not any("base_loss" in entry for entry in history):
        return None
    if not can_draw():
        logger.warning_once(f"matplotlib is not installed, so no figure of the training is drawn: {EXTRA}.")
        return None
    import matplotlib
    from matplotlib.figure import Figure

    log = pd.DataFrame([*history])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
        losses, lengths, positions = figure.subplots(1, 3)
        # The trained loss; that of held-out text alone where it was measured more than once, as the two do not compare.
        kind = "eval_" if log.get("eval_loss", pd.Series(dtype=float)).count() > 1 else ""
        _plot(losses, log, f"{kind}base_loss", COLOURS["base_"])
        _plot(losses, log, f"{kind}corrected_loss", COLOURS[""])
        _plot(lengths, log, "acceptance_length", COLOURS[""])
        walked = "walked_" if "eval_walked_acceptance_length" in log else ""
        for prefix, colour in COLOURS.items():
            _plot(lengths, log, f"eval_{prefix}{walked}acceptance_length", colour)
            rates = log.filter(regex=f"^eval_{prefix}accept_at_").dropna()
            if len(rates):
                positions.plot(range(1, rates.shape[1] + 1), rates.iloc[-1], color=colour, **DOTS)
        positions.set_ylim(0, 1)
        for axes, title, below in (
            (losses, f"loss {'of held-out text' if kind else 'that is trained'}", "step"),
            (lengths, "tokens a round", "step"),
            (positions, "right, if all before are", "position in the draft, last evaluation"),
        ):
            axes.set_title(title, loc="left", fontsize=12)
            axes.set_xlabel(below)
            axes.grid(axis="y", color=FAINT, linewidth=0.6)
            axes.xaxis.get_major_locator().set_params(integer=True)
        for prefix, label in (("base_", "base logits"), ("", "as drafted; dots: held-out text")):
            losses.plot([], [], color=COLOURS[prefix], label=label)
        figure.legend(loc="outside lower center", ncols=2)
        write_figure(figure, folder / FIGURE)
    return FIGURE


def _plot(axes: Any, log: pd.DataFrame, name: str, colour: str) -> None:
    """Dots of evaluations; of steps the running mean over a tenth of the training, as single batches differ a lot."""
    if name in log:
        values = log.set_index("step")[name].dropna()
        is_evaluation = name.startswith("eval_")
        mean = values if is_evaluation else values.rolling(len(values) // 20 * 2 + 1, 1, center=True).mean()
        axes.plot(mean.index, mean, color=colour, **(DOTS if is_evaluation else {}))
