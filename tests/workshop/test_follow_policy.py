"""The study of drafters that follow a policy runs, and pages say what its rows do."""

import runpy
import sys
from pathlib import Path

import pytest

import tables
from hf_domino.evaluation.results import Result, read_results, to_lines

SCRIPT = Path(__file__).parents[2] / "model_cards" / "workshop" / "benchmarks" / "follow_policy.py"


@pytest.mark.slow
def test_all_runs_write_the_same_completions(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    arguments = ["--steps", "3", "--max-new-tokens", "8", "--rows", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = read_results(tmp_path / "rows.jsonl")
    names = ("plain", "frozen", "frozen_memory", "every_8", "every_8_memory", "every_2")
    runs = {name: [row for row in rows if row.method == name] for name in names}
    rewards = [[row["reward"] for row in steps] for steps in runs.values()]
    assert rewards == [rewards[0]] * 6
    assert [row["rollout/drafter_age"] for row in runs["every_2"]] == [1, 2, 1]
    assert [row["update_cpu_seconds"] > 0.1 for row in runs["every_2"]] == [False, False, True]
    assert "rollout/tokens_per_forward" not in runs["plain"][0]


def test_a_table_compares_early_and_late_steps(tmp_path):
    provenance = {"hardware": "a CPU", "threads": 1, "commit": "0123456789", "date": "2026-11-27", "trl": "1"}
    rows = [
        Result(
            run,
            {"target": "tiny", "seed": 0, "step": step},
            {"reward": step / 10, "rollout/tokens_per_forward": tokens + step}
            | {"cpu_seconds": 3.0, "update_cpu_seconds": update},
            provenance,
        )
        for run, tokens, update in (("frozen", 1, 0.0), ("every_2", 2, 1.0))
        for step in range(1, 9)
    ]
    (tmp_path / "rows.jsonl").write_text(to_lines(rows))
    text = tables.rollouts(tmp_path, ["rows.jsonl"])
    assert "| `frozen` | 2.50 | 8.50 | 3.0 | 3.0 | 0% |" in text
    assert "| `every_2` | 3.50 | 9.50 | 4.0 | 4.0 | 25% |" in text
    assert "reward was 0.15 in the first quarter of the steps and 0.75" in text
    assert "`every_2` took 1.33 times as long as `frozen`" in text


def test_a_table_of_few_steps_compares_the_first_with_the_last(tmp_path):
    provenance = {"hardware": "a CPU", "threads": 1, "commit": "0123456789", "date": "2026-11-27", "trl": "1"}
    figures = {"rollout/tokens_per_forward": 2.0, "cpu_seconds": 3.0, "update_cpu_seconds": 0.0}
    settings = {"target": "tiny", "seed": 0}
    rows = [Result("frozen", settings | {"step": step}, figures | {"reward": step}, provenance) for step in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text(to_lines(rows))
    assert "reward was 1.00 in the first quarter of the steps and 3.00" in tables.rollouts(tmp_path, ["rows.jsonl"])


def test_the_published_runs_trained_the_same_policy():
    path = SCRIPT.parents[2] / "pycoder-13m-domino" / "follow-policy.jsonl"
    rows = read_results(path)
    rewards = {name: [row["reward"] for row in rows if row.method == name] for name in {row.method for row in rows}}
    assert list(rewards.values()) == 3 * [rewards["frozen"]]
    assert {row["commit"] for row in rows} == {rows[0]["commit"]}
