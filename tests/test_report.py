from __future__ import annotations

from pathlib import Path

import pytest

from hf_domino.benchmark.report import MARKERS, fill_readme, results_table
from hf_domino.benchmark.rows import read_rows
from hf_domino.benchmark.summary import summarize
from hf_domino.pair import BUNDLED

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "model_cards" / f"{BUNDLED}-domino" / "results.jsonl"

ORIGIN = {
    "pair": "tiny",
    "batch_size": 1,
    "max_new_tokens": 8,
    "repeats": 3,
    "dtype": "float32",
    "threads": 2,
    "hardware": "a CPU",
    "torch": "2",
    "transformers": "5",
    "commit": "0123456789abcdef",
    "seed": 0,
    "date": "2026-01-01",
}


def row(method, prompt, speed, lengths=(), mode="greedy", equal=True):
    return ORIGIN | {
        "method": method,
        "mode": mode,
        "prompt": prompt,
        "sources": [["module", 0, "hash"]],
        "temperature": 0.0 if mode == "greedy" else 0.7,
        "tokens_per_second": speed,
        "num_rounds": len(lengths),
        "acceptance_length": sum(lengths) / len(lengths) if lengths else None,
        "distinct_4gram": 0.8,
        "equals_plain": equal if mode == "greedy" else None,
    }


MEASURED = [(190, [2]), (200, [4, 6, 8]), (900, [3])]  # tokens/s and rounds of each prompt
ROWS = [row("plain", prompt, speed) for prompt, speed in enumerate([90, 100, 140])]
ROWS += [row("domino", prompt, speed, lengths) for prompt, (speed, lengths) in enumerate(MEASURED)]


def test_summary_takes_medians_over_prompts_and_means_over_rounds():
    summary = summarize(ROWS, "domino", "greedy")
    assert (summary.tokens_per_second, summary.speed_up) == (200, 2.0)
    assert summary.acceptance_length == pytest.approx((2 + 4 + 6 + 8 + 3) / 5)
    assert (summary.num_equal, summary.num_prompts) == (3, 3)


def test_missing_rows_are_named():
    with pytest.raises(ValueError, match="method='dflash'"):
        summarize(ROWS, "dflash", "greedy")


def test_table_shows_differences_honestly():
    rows = [*ROWS[:-1], row("domino", 2, 900, [3], equal=False)]
    assert "plain `generate`: 2 of 3" in results_table(rows)


def test_table_has_both_modes():
    sampled = [row("plain", 0, 100, mode="sample"), row("domino", 0, 150, [3], mode="sample")]
    lines = results_table(ROWS + sampled).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|") == 8
    assert "T = 0.7, speed-up" in lines[0]
    assert "1.50 x" in lines[3]


def test_fill_readme(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n")
    fill_readme(readme, ROWS)
    fill_readme(readme, ROWS)  # a second time changes nothing
    text = readme.read_text()
    assert text == f"before\n<!-- results:begin -->\n{results_table(ROWS)}<!-- results:end -->\nafter\n"


def test_readme_without_markers_is_refused(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing\n")
    with pytest.raises(ValueError, match="results:begin"):
        fill_readme(readme, ROWS)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no rows are published in this checkout")
def test_published_table_is_what_the_rows_give():
    readme = (ROOT / "README.md").read_text()
    assert (
        MARKERS.search(readme)[0]
        == f"<!-- results:begin -->\n{results_table(read_rows(PUBLISHED))}<!-- results:end -->"
    )


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no rows are published in this checkout")
def test_published_rows_say_where_they_come_from():
    for published in read_rows(PUBLISHED):
        assert set(ORIGIN) <= set(published)
        assert all(published[field] is not None for field in ORIGIN)


def test_rows_that_are_not_there_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"rows must be a JSONL file, got '.*none.jsonl': measure with `hf-domino bench"
    ):
        read_rows(tmp_path / "none.jsonl")
