"""The study of drafters that follow a policy runs, and pages say what its rows do."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import tables

SCRIPT = Path(__file__).parents[2] / "model_cards" / "workshop" / "benchmarks" / "follow_policy.py"


@pytest.mark.slow
def test_all_runs_write_the_same_completions(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    arguments = ["--steps", "3", "--max-new-tokens", "8", "--rows", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    runs = {name: [row for row in rows if row["run"] == name] for name in ("plain", "frozen", "every_8", "every_2")}
    rewards = [[row["reward"] for row in steps] for steps in runs.values()]
    assert rewards == [rewards[0]] * 4
    assert [row["rollout/drafter_age"] for row in runs["every_2"]] == [1, 2, 1]
    assert "rollout/tokens_per_forward" not in runs["plain"][0]


def test_a_table_compares_early_and_late_steps(tmp_path):
    origin = {"pair": "tiny", "hardware": "a CPU", "commit": "0123456789", "date": "2026-11-27", "step_time": 3.0}
    rows = [
        origin | {"run": run, "step": step, "reward": step / 10, "rollout/tokens_per_forward": tokens + step} | update
        for run, tokens, update in (("frozen", 1, {}), ("every_2", 2, {"rollout/update_seconds": 1.0}))
        for step in range(1, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    text = tables.rollouts(tmp_path, ["rows.jsonl"])
    assert "| `frozen` | 0.15 | 0.75 | 2.50 | 8.50 | 0% |" in text
    assert "| `every_2` | 0.15 | 0.75 | 3.50 | 9.50 | 25% |" in text
