"""The ways to generate that docs/which-way.md decides between, and its pictures: `python model_cards/workshop ways`.

The flowchart is drawn from the page's own, and the bars from the rows that the tables of the pages name, so that
pictures and pages say the same.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from hf_domino.evaluation.benchmark.options import BASELINE, PACKED, RECYCLED
from hf_domino.evaluation.benchmark.report import place_of, plain_label
from hf_domino.evaluation.results import Result, measured, read_results

EXAMPLES = "  python model_cards/workshop ways docs\n"
ALONE, WITH_LOOKUP = "domino_adaptive", "domino_lookup"
OURS = (BASELINE, PACKED, RECYCLED[-1], ALONE, WITH_LOOKUP)  # what a user of Transformers decides between
DTYPES = ("bfloat16", "float16", "float32", "float64")  # in the order of tables: files have the first one
PROMPTS = {"edits": "edits", "human-eval": "HumanEval", "spec-bench": "Spec-Bench"}  # part of a file's name -> in words
RESULTS, OTHER_ENGINES = "results-", "other-engines-"
MEASURED_ON = {
    f"{prefix}{name}{dtype}": words
    for name, words in PROMPTS.items()
    for prefix, dtype in ((RESULTS, ""), (RESULTS, "-bf16"), (OTHER_ENGINES, ""))
}  # file of results -> its prompts, if these are not the target's own
CHARACTER, ROW, COLUMN, BOX = 6.6, 62, 236, (196, 44)  # of the flowchart, in pixels
CARD, PANEL, INK, EDGE, FAINT = "#f6f8fa", "#ffffff", "#24292f", "#57606a", "#d0d7de"
LEAF = "#dafbe1"


@dataclass(frozen=True)
class Way:
    """A way to generate with weights of one kind, and its greedy tokens a second.

    Args:
        method (`str`): The method, as tables name it.
        weights (`str`): The dtype of the target's weights, or how they are quantised.
        place (`str`): What computed it.
        is_ours (`bool`): Whether it ran in Transformers.
        speeds (`dict`): Tokens a second by the name of the prompts: the geometric mean.
    """

    method: str
    weights: str
    place: str
    is_ours: bool
    speeds: dict[str, float]

    @property
    def name(self) -> str:
        """The method, and in brackets the weights."""
        return f"{self.method} ({self.weights})"

    @property
    def engine(self) -> str:
        """What generates: ours in Transformers, or the name of another engine, without its mode."""
        return "Transformers" if self.is_ours else self.method.partition(",")[0]


def prompts_of(name: str) -> str:
    """What a file of results was measured on, by its name."""
    return MEASURED_ON.get(Path(name).stem, "own prompts")


def ways_of(folder: Path, files: Sequence[str]) -> list[Way]:
    """The ways in files of `hf-domino bench` and of `benchmarks/other_engines.py`, on the prompts that all have.

    Ours come first, in the order of `OURS`, and of each the dtype that files have.
    """
    runs = {name: [row for row in measured(read_results(folder / name)) if row["mode"] == "greedy"] for name in files}
    shared: dict[str, set[str]] = {}
    for name, rows in runs.items():
        sources = {str(row["sources"]) for row in rows}
        shared[prompts_of(name)] = shared.get(prompts_of(name), sources) & sources
        if not shared[prompts_of(name)]:
            raise ValueError(f"no prompt of {prompts_of(name)} is in all of {', '.join(files)}")
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for name, rows in runs.items():
        prompts = prompts_of(name)
        for row in rows:
            if str(row["sources"]) in shared[prompts] and (is_engine(row) or row.method in OURS):
                speeds = found.setdefault((place_of(row), row.method, weights_of(row)), {})
                speeds.setdefault(prompts, []).append(row["tokens_per_second"])
    ways = [
        Way(
            plain_label(method),
            weights,
            place,
            method in OURS,
            {prompts: geometric_mean(speeds) for prompts, speeds in of_way.items()},
        )
        for (place, method, weights), of_way in found.items()
    ]
    labels = [plain_label(method) for method in OURS]

    def order(way: Way) -> tuple[str, int, int]:
        is_dtype = way.weights in DTYPES
        return (
            way.place,
            labels.index(way.method) if way.is_ours else len(labels),
            DTYPES.index(way.weights) if is_dtype else len(DTYPES),
        )

    return sorted(ways, key=order)


def is_engine(row: Result) -> bool:
    """Whether a result is of an engine outside Transformers."""
    return "dtype" not in row.settings


def weights_of(row: Result) -> str:
    """The dtype of a target's weights, or how an engine stores them, by the end of their file's or folder's name."""
    if not is_engine(row):
        return row["dtype"]
    stored = re.search(r"(?i)(i?q\d\w*|(?:fp|bf|int)\d+)(?:\.gguf)?$", row["weights"])
    if stored is None:
        return row["weights"]
    return stored[1].upper() if row["weights"].endswith(".gguf") else stored[1]


def files_of(page: Path, marker: str) -> list[str]:
    """The files that a marked place of a page names."""
    found = re.search(rf"<!-- {marker}:begin (\S+(?: \S+)*) -->", page.read_text(encoding="utf-8"))
    assert found is not None, f"{page} has no place for {marker}"
    return found[1].split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the pages."""
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the documentation, in whose `ways` they are written"
    )


def run(options: argparse.Namespace) -> None:
    """Draw the flowchart of `which-way.md` and the speeds on a CPU and on a GPU."""
    from figures import draw, write_figures

    page = options.folder / "which-way.md"
    pictures = options.folder / "ways"
    ways = ways_of(options.folder, files_of(page, "engines"))
    runs = [read_results(options.folder / name) for name in files_of(options.folder / "gpu.md", "gpu")]
    drawings: dict[str, Callable[[], Any]] = {"cpu": partial(draw_cpu, ways), "gpu": partial(draw_gpu, runs)}
    print(*write_figures(draw(drawings), pictures), sep="\n")
    flowchart = pictures / "flowchart.svg"
    flowchart.write_text(draw_flowchart(page.read_text(encoding="utf-8")), encoding="utf-8")
    print(flowchart)


def draw_cpu(ways: Sequence[Way]) -> Any:
    """Bars of tokens a second, a panel for each kind of prompts and a colour for each kind of way."""
    prompts = list(dict.fromkeys(name for way in ways for name in way.speeds))
    places = {way.place for way in ways}
    names = [way.name if len(places) == 1 else f"{way.name}, {way.place}" for way in ways]
    panels = []
    for name in prompts:
        bars = [(way.speeds.get(name), _colour(way)) for way in ways]
        panels.append((name, bars))
    return _bars(names, panels, f"tokens a second, greedy, one text at a time; {' and '.join(sorted(places))}")


def draw_gpu(runs: Sequence[Sequence[Result]]) -> Any:
    """Bars of greedy tokens a second on a GPU, a panel for each target."""
    names = list(dict.fromkeys(row.method for rows in runs for row in rows))
    panels = []
    for rows in runs:
        bars = []
        for name in names:
            speeds = [row["tokens_per_second"] for row in rows if row.method == name and row["mode"] == "greedy"]
            colour = "#3b74b8" if name.startswith("drafter") else "#8c959f"
            bars.append((geometric_mean(speeds) if speeds else None, colour))
        panels.append((rows[0]["target"], bars))
    return _bars(names, panels, f"tokens a second, greedy, one text at a time; {place_of(runs[0][0])}")


def _colour(way: Way) -> str:
    if not way.is_ours:
        return "#cf6f1e"
    return "#8c959f" if way.method in map(plain_label, (BASELINE, PACKED)) else "#3b74b8"


def _bars(names: Sequence[str], panels: Sequence[tuple[str, Sequence[tuple[float | None, str]]]], label: str) -> Any:
    """Horizontal bars beside each other, the names on the left, the first on top; a bar may be missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.4 + 0.36 * len(names)), layout="constrained")
    for axes, (title, bars) in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        axes.set_title(title, loc="left", fontsize=12)
        for place, (value, colour) in enumerate(bars):
            if value is not None:
                axes.barh(place, value, height=0.66, color=colour)
                axes.annotate(f"{value:.3g}", (value, place), xytext=(5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
    figure.supxlabel(label, fontsize=11)
    return figure


def read_flowchart(page: str) -> tuple[dict[str, str], dict[str, list[tuple[str, str]]]]:
    """The flowchart of a page: the text of each node, and what leads on from it, as answers and next nodes."""
    body = re.search(r"```mermaid\nflowchart \w+\n(.*?)```", page, re.DOTALL)
    assert body is not None, "the page has no flowchart"
    node = r"(\w+)(?:\{(.*?)\}|\[(.*?)\])?"
    texts: dict[str, str] = {}
    edges: dict[str, list[tuple[str, str]]] = {}
    for line in body[1].splitlines():
        found = re.fullmatch(rf"\s*{node} -- (.*?) --> {node}\s*", line)
        assert found is not None, f"not an edge: {line}"
        begin, *begin_text, answer, end, question, leaf = found.groups()
        for name, text in ((begin, begin_text[0] or begin_text[1]), (end, question or leaf)):
            if text:
                texts[name] = text.strip('"')
        edges.setdefault(begin, []).append((answer.strip('"'), end))
    return texts, edges


def draw_flowchart(page: str) -> str:
    """Draw the flowchart of a page from left to right: a column for each question on the way, a line for each leaf."""
    texts, edges = read_flowchart(page)
    places: dict[str, tuple[int, float]] = {}
    count = 0

    def put(name: str, depth: int) -> float:
        nonlocal count
        if name in edges:
            lines = [put(child, depth + 1) for _, child in edges[name]]
            line = (lines[0] + lines[-1]) / 2
        else:
            line = float(count)
            count += 1
        places[name] = (depth, line)
        return line

    put(next(iter(edges)), 0)
    width, height = BOX
    parts = []
    for name, children in edges.items():
        left, top = _corner(places[name])
        for _, child in children:
            right, bottom = _corner(places[child])
            begin, middle, end = left + width, right - (COLUMN - width) / 2 - 6, right
            y, to = top + height / 2, bottom + height / 2
            parts.append(f'<path d="M{begin} {y}H{middle}V{to}H{end}" fill="none" stroke="{EDGE}"/>')
    for name, (depth, line) in places.items():
        left, top = _corner((depth, line))
        fill = PANEL if name in edges else LEAF
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{EDGE}"/>'
        )
        lines = _wrapped(texts[name], int(width / CHARACTER))
        for number, text in enumerate(lines):
            y = top + height / 2 + 4.5 + 15 * (number - (len(lines) - 1) / 2)
            parts.append(f'<text x="{left + width / 2}" y="{y}" text-anchor="middle">{escape(text)}</text>')
    for children in edges.values():
        for answer, child in children:
            right, bottom = _corner(places[child])
            parts.append(f'<text x="{right + 4}" y="{bottom - 4}" class="answer">{escape(answer)}</text>')
    deepest = max(depth for depth, _ in places.values())
    total = (32 + COLUMN * deepest + width, 20 + ROW * count)
    style = f"text{{font:13px sans-serif;fill:{INK}}}.answer{{font:italic 12px sans-serif;fill:{EDGE}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" '
        f'viewBox="0 0 {total[0]} {total[1]}"><style>{style}</style>'
        f'<rect width="100%" height="100%" rx="8" fill="{CARD}"/>{"".join(parts)}</svg>\n'
    )


def _corner(place: tuple[int, float]) -> tuple[float, float]:
    """The left upper corner of a box, in pixels."""
    depth, line = place
    return 16 + COLUMN * depth, 24 + ROW * line


def _wrapped(text: str, length: int) -> list[str]:
    """A text in lines that fit into a box."""
    return textwrap.wrap(text, length)
