"""Pictures are drawn from rows, or from an opened round, and say what these say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import measured
import pytest
import torch

pytest.importorskip("matplotlib")

import commands
from figures import COLOURS, colour_of, colours_of, make_figures, write_figures
from hf_domino import explain_round
from hf_domino.evaluation.benchmark.options import METHODS
from hf_domino.evaluation.results import read_results, to_lines
from round_figure import draw_round
from ways import draw_flowchart

ROOT = Path(__file__).parents[2]


def words(path):
    """All text of an SVG file."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_figures_are_drawn_from_rows(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(to_lines(measured.rows()))
    assert commands.main(["figures", str(tmp_path / "rows.jsonl"), str(tmp_path / "new" / "folder")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["speed-up.svg", "acceptance.svg", "round.svg"]
    speed_up, acceptance, round_ = map(words, paths)
    for text in ("plain generate", "Domino", "2.00 x", "1.20 x", "greedy", "T = 0.7"):
        assert text in speed_up
    assert "prompt lookup" in acceptance
    assert "plain" not in acceptance
    assert "10.0 ms, 10.0 % outside" in round_
    assert "target forward" in round_
    rows = read_results(tmp_path / "rows.jsonl")
    (again,) = (path for path in write_figures(make_figures(rows), tmp_path) if path.stem == "speed-up")
    assert again.read_bytes() == paths[0].read_bytes()


def test_figures_of_rows_without_rounds():
    rows = [measured.row("plain", 0, [100]), measured.row("domino", 0, [150])]
    assert list(make_figures(rows)) == ["speed-up"]


def test_rows_of_another_program_are_refused(capsys, tmp_path):
    rows = ROOT / "model_cards/pycoder-13m-domino/gpu-speed.jsonl"
    assert commands.main(["figures", str(rows), str(tmp_path)]) == 2
    assert "ROWS must be those of `hf-domino bench`" in capsys.readouterr().err


def test_drafters_that_are_compared_have_colours_of_their_own_by_their_kind():
    names = ("plain", "a (Domino), chains", "a (Domino), trees", "b (EAGLE-3)", "c (Domino)", "of mine")
    colours = colours_of([replace(row, method=name) for name in names for row in measured.rows()[-1:]])
    assert len(set(colours.values())) == len(names)
    assert len(set(COLOURS)) == len(METHODS)
    assert colours["a (Domino), chains"] == colour_of("domino_adaptive")
    assert colours["b (EAGLE-3)"] not in COLOURS  # no other method's


def test_no_legend_is_cut(tmp_path):
    names = (
        "prompt_lookup",
        "native_dflash",
        "dflash",
        "dflash_adaptive",
        "domino",
        "domino_adaptive",
        "domino_lookup",
    )
    rows = [measured.row("plain", 0, [100]), *(measured.row(name, 0, [100], [4, 2]) for name in names)]
    figure = make_figures(rows)["acceptance"]
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("tree_size", [None, 11])
def test_an_opened_round_shows_proposals_chances_and_choices(tiny_qwen3, make_drafter, tree_size):
    prompt = torch.tensor([[5, 9, 33, 20, 7, 41]])
    opened = explain_round(make_drafter(tiny_qwen3, draft_tree_size=tree_size), tiny_qwen3, prompt)
    opened.target_probs[0, opened.proposals[0]] = 2.0  # the target's own choice
    drawn = [text.get_text() for text in draw_round(opened).axes[0].texts]
    assert {"41", *map(str, opened.proposals.tolist())} <= set(drawn)
    for position in set(range(len(opened.choices))) - set(opened.path[:-1]):
        assert f" → {opened.choices[position]}" in drawn
    assert tree_size is None or {f"{chance:.0%}" for chance in opened.chances.tolist()} <= set(drawn)


def test_the_picture_of_the_flowchart_is_that_of_its_page():
    page = (ROOT / "docs" / "which-way.md").read_text()
    assert draw_flowchart(page) == (ROOT / "docs" / "ways" / "flowchart.svg").read_text()
    assert "Must it be" in words(ROOT / "docs" / "ways" / "flowchart.svg")
