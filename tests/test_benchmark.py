from __future__ import annotations

import json

import pytest

from hf_domino import cli
from hf_domino.benchmark import distinct_ngram_ratio
from hf_domino.report import METHODS, read_rows

FLAGS = ["--num-prompts", "2", "--max-new-tokens", "12", "--repeats", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def rows_file(tiny_pair_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    assert cli.main(["bench", "--pair", str(tiny_pair_folder), "--rows", str(path), *FLAGS]) == 0
    return path


def test_one_row_per_prompt_method_and_mode(rows_file):
    rows = read_rows(rows_file)
    assert [(row["mode"], row["prompt"], row["method"]) for row in rows] == [
        (mode, prompt, method) for mode in ("greedy", "sample") for prompt in range(2) for method in METHODS
    ]


def test_rows_carry_their_origin(rows_file):
    for row in read_rows(rows_file):
        assert row["pair"] == "tiny"
        assert row["threads"] == 1
        for field in ("hardware", "cores", "torch", "transformers", "commit", "seed", "date", "sources"):
            assert row[field] is not None, field


def test_greedy_outputs_are_equal_and_drafters_are_counted(rows_file):
    for row in read_rows(rows_file):
        assert row["new_tokens"] <= 12
        if row["mode"] == "greedy":
            assert row["equals_plain"]
        if row["method"] in ("domino", "dflash"):
            assert row["acceptance_length"] >= 1
        else:
            assert row["num_rounds"] == 0


def test_batches(tiny_pair_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    flags = ["--pair", str(tiny_pair_folder), "--rows", str(path), "--temperature", "0", "--batch-size", "2"]
    assert cli.main(["bench", *flags, *FLAGS]) == 0
    rows = read_rows(path)
    assert [row["method"] for row in rows] == ["plain", "dflash", "domino"]
    assert all(len(row["sources"]) == 2 and row["new_tokens"] <= 24 for row in rows)


def test_readme_flag_only_writes_the_table(rows_file, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    before = rows_file.read_text()
    assert cli.main(["bench", "--rows", str(rows_file), "--readme", str(readme)]) == 0
    assert "**Domino**" in readme.read_text()
    assert rows_file.read_text() == before


def test_bench_fails_where_outputs_differ(tiny_pair_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_domino.benchmark.torch.equal", lambda first, second: False)
    path = tmp_path / "rows.jsonl"
    flags = ["--pair", str(tiny_pair_folder), "--rows", str(path), "--temperature", "0", *FLAGS]
    assert cli.main(["bench", *flags]) == cli.FAILED_CHECK
    assert not json.loads(path.read_text().splitlines()[0])["equals_plain"]


@pytest.mark.parametrize(("tokens", "ratio"), [([1, 2, 3], 1.0), ([1, 2, 3, 4, 5], 1.0), ([7] * 8, 0.2)])
def test_distinct_ngram_ratio(tokens, ratio):
    assert distinct_ngram_ratio(tokens) == ratio
