"""What is computed from rows: summaries, tables and figures."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
import study_rows

import commands
from hf_domino._common.figures import write_figures
from study.figures import (
    BETTER,
    FEWEST_ROUNDS,
    SAME,
    WORSE,
    colour_of,
    make_figures,
    name_marks,
)
from study.page import results
from study.summary import pooled_scatter, summarize


@pytest.fixture
def study(tmp_path):
    return study_rows.study(tmp_path)


def test_differences_are_measured_by_the_scatter_over_seeds(study):
    found = {summary.variant: summary for summary in summarize(study, study_rows.rows())}
    assert list(found) == list(study.variants)
    assert found["domino"].difference is None
    twin = found["dflash"].difference
    assert (twin.above, twin.seeds, twin.is_clear) == (0, 3, True)
    assert twin.mean == pytest.approx(-0.6)
    # Variances .01, .01 and .0025 with two degrees of freedom each; Student's t of six is 2.45.
    deviation = math.sqrt((0.01 + 0.01 + 0.0025) / 3)
    assert twin.error == pytest.approx(2.45 * deviation * math.sqrt(2 / 3))
    assert found["layers_1"].difference.error == pytest.approx(2.45 * deviation * math.sqrt(4 / 3))
    head = found["head_only"].difference  # compared with the twin whose backbone it has
    assert (head.against, head.above, head.is_clear) == ("dflash", 2, False)
    assert (found["domino"].low, found["domino"].high) == (3.0, 3.2)


def test_one_seed_alone_says_nothing_of_chance(study):
    alone = [study_rows.row("domino", 0, 3.0), study_rows.row("dflash", 0, 2.0)]
    assert math.isnan(pooled_scatter([alone[:1]])[0])
    assert summarize(study, alone)[1].difference.error is None
    assert "chance" not in results(study, alone).split("|")[0]


def test_the_page_says_what_the_rows_say(study):
    text = results(study, study_rows.rows())
    assert "`domino` has 1.24 x the acceptance length of its twin `dflash`, above it at 3 of 3 seeds." in text
    assert "More than chance, and worse: `layers_1` (−0.90), `dflash` (−0.60)." in text  # noqa: RUF001
    assert "Within chance: `greedy_text` (−0.05), `head_only` (+0.05)." in text  # noqa: RUF001
    assert "| `domino`: The base | 3.10 (3.00 to 3.20) |  |  | 2.50 | 2.00 | 2.50 M | 59 |" in text
    assert "Budget `small`: 11 runs of 2 steps x 8 rows x 24 anchors, for tiny." in text


def test_figures_follow_the_rows(study, tmp_path):
    pytest.importorskip("matplotlib")
    words = {
        path.stem: " ".join(ElementTree.parse(path).getroot().itertext())
        for path in write_figures(make_figures(study, study_rows.rows()), tmp_path)
    }
    assert "greedy_text" in words["variants"]
    assert "layers_1" not in words["positions"]  # several seeds only
    assert "layers_1" in words["size"]
    assert "size" not in make_figures(study, study_rows.rows()[:9])
    colours = {summary.variant: colour_of(summary) for summary in summarize(study, study_rows.rows())}
    assert (colours["layers_1"], colours["greedy_text"]) == (WORSE, SAME)
    better = [*study_rows.rows()[:9], study_rows.row("layers_1", 0, 4.0)]
    assert colour_of(summarize(study, better)[-1]) == BETTER


def test_shares_of_a_handful_of_rounds_are_not_drawn(study):
    pytest.importorskip("matplotlib")
    few = [row | {"num_rounds": 40} for row in study_rows.rows()]
    panels = make_figures(study, few)["positions"].axes
    of_twin = [
        next(line for line in axes.get_lines() if line.get_label() == "dflash").get_xdata().tolist() for axes in panels
    ]
    assert of_twin == [[1, 2, 3], [1]]  # 120, 90 and 54 rounds
    assert f"{FEWEST_ROUNDS} or more" in panels[1].get_title(loc="left")


def test_names_lie_apart():
    figures = pytest.importorskip("matplotlib.figure")
    from matplotlib.text import Text

    figure = figures.Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    places = [(1.0, 1.0), (1.001, 1.0), (1.0, 1.001), (2.0, 2.0), (1.999, 2.0)]
    for place in places:
        axes.plot(*place, "o")
    name_marks(axes, [(f"variant_{index}", place, "black") for index, place in enumerate(places)])
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # less the lines that lead there
    assert len(boxes) == len(places)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(axes.bbox.contains(*corner) for box in boxes for corner in (box.min, box.max))


def test_the_command_shows_without_training(study, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in study_rows.rows()))
    flags = ["study", "--study", str(tmp_path / "study.yaml"), "--rows", str(path)]
    assert commands.main([*flags, "--list", "--budget", "small"]) == 0
    said = capsys.readouterr().out
    assert "budget small: 2 steps, 16 texts; 11 of 11 runs" in said
    assert "its seeds (x has a row, . has none)" in said
    assert "layers_1         x    One layer  [num_hidden_layers=1]" in said
    assert commands.main([*flags, "--json"]) == 0
    assert [entry["variant"] for entry in json.loads(capsys.readouterr().out)] == list(study.variants)
    pytest.importorskip("matplotlib")
    assert commands.main([*flags, "--figures", str(tmp_path / "drawn")]) == 0
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == {"variants.svg", "positions.svg", "size.svg"}
