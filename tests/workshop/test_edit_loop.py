"""The edit loop counts the forwards of answers that are known, and pages show its rows."""

from __future__ import annotations

import itertools
import random

import pytest

import tables
from hf_domino import LookupMemory
from hf_domino.decoding.prompt_lookup import PromptLookup
from hf_domino.evaluation.results import Result, to_lines

CODE = "\n".join(f"value_{index} = compute(value_{index - 1})" for index in range(1, 20))


@pytest.fixture
def edit_loop(benchmark_module):
    return benchmark_module("edit_loop")


def test_each_change_begins_with_the_file_that_the_last_one_left(edit_loop):
    turns = edit_loop.loop(CODE, seed=0)
    assert len(turns) == edit_loop.NUM_CHANGES
    assert CODE in turns[0][0]
    for (_, answer), (prompt, _) in itertools.pairwise(turns):
        assert prompt.endswith(f"{answer}\n\n")
    assert all(answer not in prompt for prompt, answer in turns)
    assert turns == edit_loop.loop(CODE, seed=0) != edit_loop.loop(CODE, seed=1)


def test_all_tokens_are_counted_and_those_that_are_looked_up_save_forwards(edit_loop):
    draws = random.Random(0)
    text = [draws.randrange(1000) for _ in range(101)]
    new = {"new_tokens": 100, "rounds": 100, "proposed": 0}
    assert edit_loop.answer([1, 2, 3], text, PromptLookup(10, 1000)) == new
    memory = LookupMemory(1000)
    assert edit_loop.answer([1, 2, 3], text, PromptLookup(10, 1000, memory=memory)) == new
    again = edit_loop.answer([1, 2, 3], text, PromptLookup(10, 1000, memory=memory))
    assert again["new_tokens"] == 100
    assert 10 <= again["rounds"] < 20
    assert again["proposed"] >= 100 - again["rounds"]


def test_a_table_has_a_row_for_each_memory_and_a_column_for_each_limit(tmp_path):
    provenance = {"hardware": "a CPU", "commit": "0123456789", "date": "2026-11-28"}
    rows = [
        Result(
            method,
            {"tokenizer": "tiny", "seed": 0, "module": module, "change": 0, "limit": limit},
            {"new_tokens": 90, "rounds": 900 // size},
            provenance,
        )
        for module in ("csv", "heapq")
        for method, factor in (("lookup", 1), ("memory", 3))
        for limit in (10, 30)
        for size in [limit * factor]
    ]
    (tmp_path / "rows.jsonl").write_text(to_lines(rows))
    text = tables.edits(tmp_path, ["rows.jsonl"])
    assert "| | up to 10 tokens a round | up to 30 tokens a round |" in text
    assert "| lookup | 1.00 | 3.00 |" in text
    assert "| memory | 3.00 | 9.00 |" in text
    assert "1 change to each of 2 files" in text
