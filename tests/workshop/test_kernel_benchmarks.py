"""The benchmark scripts run from end to end, and what they check can fail."""

from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from domino_kernels.dispatch import has_triton
from hf_domino.evaluation.results import read_results

FOLDER = Path(__file__).parents[2] / "model_cards" / "workshop" / "benchmarks"
SCRIPTS = {
    "correct_and_choose": ["vocabulary", "vocabulary, sampled", "pool"],
    "gru_step": ["ids", "embeddings"],
    "head": ["vocabulary", "pool", "top-k of the pools"],
    "branches": ["advance", "correct", "depth"],
}


@pytest.fixture
def folder_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return monkeypatch


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run(script, folder_on_path, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    folder_on_path.setattr(sys, "argv", [script, "--dry-run", "--batch-size", "2", "--results", str(path)])
    runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    rows = read_results(path)
    implementations = ["reference", "triton"] if has_triton() else ["reference"]
    assert [(row["case"], row.method) for row in rows] == [*itertools.product(SCRIPTS[script], implementations)]
    for row in rows:
        assert row.items() >= {"kernel": script, "dry_run": True, "torch": torch.__version__}.items()
        assert {"hardware", "commit", "seed", "date", "triton"} <= row.keys()
        assert row["median_ms"] > 0
    assert capsys.readouterr().out.count("\n") == len(rows) + 2


def test_wrong_results_are_found(folder_on_path):
    import timing

    base, low_rank, up_weight = torch.tensor([[1.0, 2.0, 0.0]]), torch.ones(1, 2), torch.zeros(3, 2)
    timing.check_choice(torch.tensor([1]), base, low_rank, up_weight)
    with pytest.raises(AssertionError, match="miss the largest logit"):
        timing.check_choice(torch.tensor([0]), base, low_rank, up_weight)
    timing.check_state(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(AssertionError):
        timing.check_state(torch.ones(1, 2), torch.ones(1, 2) + 1e-3)
    import branches

    inputs = base, torch.zeros(1, 2), torch.zeros(1, 1, 2), up_weight, torch.tensor([[0, 1, 2]])
    branches.check_scores(base[None], *inputs)
    with pytest.raises(AssertionError):
        branches.check_scores(base[None] + 1e-3, *inputs)


@pytest.mark.slow
def test_everything_that_needs_a_gpu_runs_dry(tmp_path):
    script = [sys.executable, str(FOLDER / "on_gpu.py"), "--output", str(tmp_path), "--dry-run"]
    subprocess.run(script, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    names = {path.stem for path in tmp_path.iterdir()}
    assert names == {
        "correct_and_choose",
        "gru_step",
        "head",
        "branches",
        "rounds",
        "trees",
        "recycling",
        "recycling_8",
        "recycling_pair",
        "pair",
        "pair_4",
        "pair_8",
    }
