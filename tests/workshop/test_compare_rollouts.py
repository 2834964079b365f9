"""The comparison of rollouts runs, and all that choose from the whole vocabulary choose the same in fp32."""

import runpy
import sys
from pathlib import Path

from hf_domino.evaluation.results import read_results

SCRIPT = Path(__file__).parents[2] / "model_cards" / "workshop" / "benchmarks" / "compare_rollouts.py"


def test_dry_run(tmp_path, monkeypatch):
    arguments = ["--dry-run", "--blocks", "2", "--dtypes", "float32", "--results", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = {row.method: row for row in read_results(tmp_path / "rows.jsonl")}
    assert list(rows) == ["whole_block", "stepwise", "exact", "pool"]
    assert [rows[name]["blocks_equal_to_whole_block"] for name in ("whole_block", "stepwise", "exact")] == [2, 2, 2]
    assert all(row["ms_per_block"] > 0 and row["commit"] for row in rows.values())
