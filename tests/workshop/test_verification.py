"""The benchmark of verification forwards on a CPU: rows of both ways, whose logits are compared."""

from __future__ import annotations

import pytest
import torch

from hf_domino.evaluation.results import read_results


@pytest.fixture
def verification(benchmark_module):
    """The module of the command."""
    return benchmark_module("verification")


def test_rows_of_tiny_shapes(verification, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    verification.main(["--shapes", "tiny", "--contexts", "20", "50", "--repeats", "3", "--rows", str(path)])
    rows = read_results(path)
    cases = [(row["dtype"], row["context"], row["method"]) for row in rows]
    methods = (verification.REPEATED, verification.FOLDED)
    assert cases == [(dtype, n, name) for dtype in ("float32", "bfloat16") for n in (20, 50) for name in methods]
    for row in rows:
        assert 0 < row["ms_least"] <= row["ms"] <= row["ms_most"]
        assert {"hardware", "commit", "seed", "torch", "transformers", "width"} <= set(row)
    assert "faster" in capsys.readouterr().out


def test_logits_that_differ_end_it(verification):
    sizes = verification.SHAPES["tiny"]
    model = verification.Qwen3ForCausalLM(verification.Qwen3Config(**sizes)).eval()
    with pytest.raises(AssertionError, match="logits differ"):
        verification.forward_times(model, 20, 5, 1, tolerance=-1.0)
    assert torch.is_grad_enabled()
