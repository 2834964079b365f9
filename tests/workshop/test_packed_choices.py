"""The benchmark that counts the choices which packed weights change."""

from __future__ import annotations

from pathlib import Path

import tables
from hf_domino.evaluation.results import read_results, to_lines

TARGET = Path(__file__).parents[2] / "model_cards" / "pycoder-13m"


def test_rows_count_the_choices_of_decode_steps_and_rounds(benchmark_module, monkeypatch, tmp_path):
    packed_choices = benchmark_module("packed_choices")
    monkeypatch.setenv(packed_choices.SETTING, packed_choices.ALWAYS)  # which the command sets: undone after the test
    rows = tmp_path / "rows.jsonl"
    for seed in (0, 1):
        words = ["--target", TARGET, "--texts", 2, "--length", 32, "--seed", seed, "--rows", rows]
        packed_choices.main(list(map(str, words)))
    found = read_results(rows)
    assert [(row["seed"], row["width"]) for row in found] == [
        (seed, width) for seed in (0, 1) for width in (1, 4, 8, 16)
    ]
    assert all(row["num_tokens"] == 32 and row["greedy"] == row["sampled"] == 0 for row in found)
    assert all(row["logits_changed"] > 0 for row in found)  # the weights are packed
    said = tables.choices(tmp_path, [rows.name])
    assert "pycoder-13m in float32 chose 32 tokens" in said
    assert "with packed ones, 1, 4, 8 and 16 at a time: packed weights changed none of them" in said
    assert said.count("chose 32 tokens") == 2  # a second run is said, too
    rows.write_text(to_lines([found[0] | {"sampled": 3}]))
    assert "1 at a time: 0 greedy and 3 sampled ones differ" in tables.choices(tmp_path, [rows.name])
