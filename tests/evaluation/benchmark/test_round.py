"""A round on a CPU with tiny shapes: rows say where they come from, and what they are a multiple of."""

import json

import pytest
import torch

from hf_domino.cli.main import main
from hf_domino.evaluation.benchmark.round import METHODS, ON_GPU, random_models, weight_bytes


def test_rows_of_tiny_shapes(tmp_path, capsys):
    rows = tmp_path / "rounds.jsonl"
    flags = ["--context", "40", "--max-new-tokens", "24", "--repeats", "2", "--device", "cpu", "--tree-size", "20"]
    assert main(["bench", "--round", "tiny", *flags, "--rows", str(rows)]) == 0
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["method"] for row in written] == [method for method in METHODS if method not in ON_GPU]
    for row in written:
        assert (row["repeats"], row["rounds"], row["shapes"], row["tree_size"]) == (2, 24, "tiny", 20)
        assert row["is_equal"]  # in fp32 all methods give one text
        assert 0 < row["ms_least"] <= row["ms"] <= row["ms_most"]
        assert row["floor_ms"] == pytest.approx(1e3 * row["bytes"] / row["bandwidth"], rel=1e-4)
        assert {"hardware", "commit", "seed", "torch", "transformers", "dtype"} <= set(row)
    assert written[0]["bytes"] == written[1]["bytes"] > written[2]["bytes"]
    assert "floor" in capsys.readouterr().out


def test_bytes_are_those_of_all_weights_but_the_embeddings():
    target, drafter = random_models("tiny", torch.float32, "cpu")
    assert weight_bytes(target) == 4 * (target.num_parameters() - target.model.embed_tokens.weight.numel())
    assert weight_bytes(drafter) == 4 * drafter.num_parameters()


def test_a_number_of_rounds_that_leaves_none_to_time(tmp_path, capsys):
    assert main(["bench", "--round", "tiny", "--max-new-tokens", "4", "--rows", str(tmp_path / "rows")]) == 2
    assert "--max-new-tokens with --round must be at least 16, got 4" in capsys.readouterr().err
