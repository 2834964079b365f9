"""Rows of short trainings: what the plan chose, what it took, and what the drafter emits."""

from __future__ import annotations

from hf_domino.evaluation.results import read_results


def test_a_row_says_what_was_trained_and_what_it_emits(benchmark_module, recipe, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    files = [f"--{name.replace('_', '-')}={recipe[name]}" for name in ("target", "train_file", "eval_file")]
    shape = ["--num-hidden-layers=1", "--block-size=4", "--max-steps", "1"]
    benchmark_module("minutes").main([*files, "--methods", "dflash", "--rates", "0.01", "--results", str(path), *shape])
    (row,) = read_results(path)
    assert (row["method"], row["muon_learning_rate"], row["minutes"]) == ("dflash", 0.01, None)
    assert (row["steps"], row["block_size"]) == (1, 4)
    assert row["tokens_per_forward"] >= 1
    assert row["cpu_seconds"] > 0
    assert {"seed", "commit", "hardware", "torch", "num_anchors", "rows"} <= set(row)
    assert "tokens_per_forward" in capsys.readouterr().out
