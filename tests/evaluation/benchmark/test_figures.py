from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree

import measured
import pytest

from hf_domino._common.figures import write_figures
from hf_domino.evaluation.benchmark.figures import COLOURS, colour_of, colours_of, make_figures
from hf_domino.evaluation.benchmark.options import METHODS

pytest.importorskip("matplotlib")


def words(path):
    """All text of an SVG file."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_figures_are_drawn_from_rows(tmp_path):
    paths = write_figures(make_figures(measured.rows()), tmp_path / "new" / "folder")
    assert [path.name for path in paths] == ["speed-up.svg", "acceptance.svg", "round.svg"]
    speed_up, acceptance, round_ = map(words, paths)
    for text in ("plain generate", "Domino", "2.00 x", "1.25 x", "greedy", "T = 0.7"):
        assert text in speed_up
    assert "prompt lookup" in acceptance
    assert "plain" not in acceptance
    assert "10.0 ms, 10.0 % outside" in round_
    assert "target forward" in round_
    (again,) = (path for path in write_figures(make_figures(measured.rows()), tmp_path) if path.stem == "speed-up")
    assert again.read_bytes() == paths[0].read_bytes()


def test_figures_of_rows_without_rounds():
    rows = [measured.row("plain", 0, [100]), measured.row("domino", 0, [150])]
    assert list(make_figures(rows)) == ["speed-up"]


def test_without_matplotlib_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install matplotlib"):
        make_figures(measured.rows())


def test_drafters_that_are_compared_have_colours_of_their_own_by_their_kind():
    names = ("plain", "a (Domino), chains", "a (Domino), trees", "b (EAGLE-3)", "c (Domino)", "of mine")
    colours = colours_of([row | {"method": name} for name in names for row in measured.rows()[-1:]])
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
