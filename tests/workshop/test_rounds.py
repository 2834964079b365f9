"""A round on a CPU with tiny shapes: rows say where they come from, and what they are a multiple of."""

import pytest
import torch

from hf_domino.evaluation.results import read_results


@pytest.fixture
def rounds(benchmark_module):
    """The module of the command."""
    return benchmark_module("rounds")


@pytest.mark.parametrize("drafter", ["domino", "recycling"])
def test_rows_of_tiny_shapes(rounds, drafter, tmp_path, capsys):
    path = tmp_path / "rounds.jsonl"
    flags = ["--shapes", "tiny", "--context", "8", "--rounds", "16", "--repeats", "2", "--device", "cpu"]
    flags += ["--drafter", drafter, "--dtype", "float32", "--tree-size", "20"]
    assert rounds.main([*flags, "--results", str(path)]) == 0
    written = read_results(path)
    assert [row["method"] for row in written] == [method for method in rounds.METHODS if method not in rounds.ON_GPU]
    for row in written:
        assert (row["repeats"], row["rounds"], row["shapes"], row["tree_size"]) == (2, 16, "tiny", 20)
        assert row["drafter"] == drafter
        assert row["is_equal"]  # in fp32 all methods give one text
        assert 0 < row["ms_least"] <= row["ms"] <= row["ms_most"]
        assert row["floor_ms"] == pytest.approx(1e3 * row["bytes"] / row["bandwidth"], rel=1e-4)
        assert {"hardware", "commit", "seed", "torch", "transformers", "dtype"} <= set(row)
    drafted, also_drafted, alone = (row["bytes"] for row in written)
    assert drafted == also_drafted
    assert (drafted == alone) if drafter == "recycling" else (drafted > alone)
    assert "floor" in capsys.readouterr().out


def test_bytes_are_those_of_all_weights_but_the_embeddings(rounds):
    target, drafter = rounds.random_models("tiny", torch.float32, "cpu")
    assert rounds.weight_bytes(target) == 4 * (target.num_parameters() - target.model.embed_tokens.weight.numel())
    assert rounds.weight_bytes(drafter) == 4 * drafter.num_parameters()


def test_a_number_of_rounds_that_leaves_none_to_time(rounds, tmp_path, capsys):
    with pytest.raises(SystemExit):
        rounds.main(["--shapes", "tiny", "--rounds", "4", "--results", str(tmp_path / "rows")])
    assert "--rounds must be at least 16, got 4" in capsys.readouterr().err
