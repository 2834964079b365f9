"""The benchmark by length of the prompt: rows with a window and without, whose texts are plain's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_domino.evaluation.results import read_results

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_rows_of_the_bundled_pair(benchmark_module, monkeypatch, tmp_path, capsys):
    contexts = benchmark_module("contexts")

    # Its tokenizer has no template for chats.
    monkeypatch.setattr(
        contexts,
        "prompts_of",
        lambda tokenizer, length, count: [tokenizer("x = 1\n" * length, return_tensors="pt").input_ids],
    )
    path = tmp_path / "rows.jsonl"
    pair = [str(ROOT / "model_cards" / name) for name in ("pycoder-13m", "pycoder-13m-domino")]
    contexts.main(
        [
            "--target",
            pair[0],
            "--drafter",
            pair[1],
            "--contexts",
            "20",
            "60",
            "--window",
            "32",
            "--max-new-tokens",
            "12",
        ]
        + ["--results", str(path)]
    )
    rows = read_results(path)
    assert [(row["context"], row["window"]) for row in rows] == [(20, None), (20, 32), (60, None), (60, 32)]
    assert all(row["equals_plain"] and row["acceptance_length"] >= 1 for row in rows)
    whole, window = (row["context_bytes"] for row in rows[2:])
    assert window < whole
    assert "acceptance" in capsys.readouterr().out
