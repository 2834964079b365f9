"""The benchmark of a pair on a GPU, on a CPU with tiny models."""

from __future__ import annotations

import pytest

from hf_domino.evaluation.results import read_results


def test_rows_stay_until_a_run_has_read_its_prompts(benchmark_module, tiny_pair_folder, monkeypatch, tmp_path):
    pairs = benchmark_module("pairs")
    monkeypatch.setattr(pairs, "methods_of", lambda pair: {"plain": {}, "drafter": {"assistant_model": pair.drafter}})
    rows, prompts = tmp_path / "rows.jsonl", tmp_path / "prompts.jsonl"
    words = ["--target", tiny_pair_folder, "--device", "cpu", "--num-prompts", 1, "--max-new-tokens", 6]
    words = [*map(str, words), "--results", str(rows)]
    assert pairs.main(words) == 0
    before = read_results(rows)
    assert len(before) == 4  # two methods, greedy and sampled
    prompts.write_text('{"no": "text"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl"):
        pairs.main([*words, "--prompts", str(prompts)])
    assert read_results(rows) == before
