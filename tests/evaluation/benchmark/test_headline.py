"""The first screen of the README says what the rows do."""

from __future__ import annotations

from pathlib import Path

import measured
import pytest

from hf_domino.evaluation.benchmark.headline import fill_headline, headline
from hf_domino.evaluation.benchmark.report import number
from hf_domino.evaluation.benchmark.summary import summarize

ROOT = Path(__file__).parents[3]
ROWS = [row | {"method": "domino_adaptive"} if row["method"] == "domino" else row for row in measured.rows()]


def test_a_line_is_what_the_rows_give():
    summary = summarize(ROWS, "domino_adaptive", "greedy")
    text = headline([ROWS])
    assert f"**{summary.speed_up:.1f} times as fast**" in text
    assert f"| {number(summary.speed_up, ' x')} |" in text


@pytest.mark.skipif(not (ROOT / "model_cards").exists(), reason="no rows are published in this checkout")
def test_the_readme_says_what_the_rows_do(tmp_path):
    page = tmp_path / "README.md"
    page.write_text((ROOT / "README.md").read_text())
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    fill_headline(page)
    assert page.read_text() == (ROOT / "README.md").read_text()
    assert "times as fast" in page.read_text()
