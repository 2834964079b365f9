"""The benchmark that counts the choices which packed weights change."""

from __future__ import annotations

from pathlib import Path

import tables
from hf_domino.evaluation.results import read_results

TARGET = Path(__file__).parents[2] / "model_cards" / "pycoder-13m"


def test_a_row_counts_the_choices_of_the_bundled_model(benchmark_module, tmp_path):
    rows = tmp_path / "rows.jsonl"
    words = ["--target", TARGET, "--texts", 2, "--length", 16, "--rows", rows]
    benchmark_module("packed_choices").main(list(map(str, words)))
    (row,) = read_results(rows)
    assert row["num_tokens"] == 32
    assert row["greedy"] == row["sampled"] == 0
    assert "Of 32 tokens that pycoder-13m chose in float32, packed weights changed 0 greedy and 0 sampled ones" in (
        tables.choices(tmp_path, [rows.name])
    )
