"""The benchmark without a trained drafter: its questions, its rows, and what the page says of them."""

from __future__ import annotations

import json
import re

import pytest
from chats import chat_tokenizer, write_lines

import tables
from hf_domino.evaluation.results import read_results


def test_questions_of_each_task_take_turns(benchmark_module, tmp_path):
    no_drafter = benchmark_module("no_drafter")
    categories = ("writing", "rag", "stem", "qa")
    asked = [{"category": categories[n % 4], "turns": [f"{categories[n % 4]} {n}?", "And?"]} for n in range(40)]
    path = tmp_path / "questions.jsonl"
    write_lines(path, asked)
    found = list(no_drafter.prompts(path, 2))
    assert [(task, half) for task, half, _ in found[:6]] == [
        (task, half) for half in ("cold", "warm") for task in ("mt_bench", "rag", "qa")
    ]
    assert len({text for *_, text in found}) == len(found) == 6 + len(no_drafter.TURNS)
    with pytest.raises(ValueError, match="--per-task must be at most 10, got 11"):
        no_drafter.questions(path, 11)


def test_rows_of_a_tiny_target_fill_the_page(benchmark_module, tiny_llama, tiny_tokenizer, monkeypatch, tmp_path):
    no_drafter = benchmark_module("no_drafter")
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"category": "qa", "turns": [f"Why {n}?"]}) + "\n" for n in range(4)))
    monkeypatch.setattr(no_drafter, "TURNS", ("Begin.", "Go on."))
    calls = []
    generate = tiny_llama.generate
    monkeypatch.setattr(tiny_llama, "generate", lambda **call: calls.append(call) or generate(**call))
    monkeypatch.setattr(no_drafter.AutoModelForCausalLM, "from_pretrained", lambda *words, **more: tiny_llama)
    monkeypatch.setattr(
        no_drafter.AutoTokenizer, "from_pretrained", lambda *words, **more: chat_tokenizer(tiny_tokenizer)
    )
    rows = tmp_path / "rows.jsonl"
    words = ["--target", "tiny", "--questions", questions, "--per-task", 2, "--max-new-tokens", 8, "--rows", rows]
    no_drafter.main(list(map(str, words)))
    found = read_results(rows)
    assert len(found) == 6 * 4
    assert all(row["equals_plain"] and row["seconds"] > 0 for row in found)
    timed = [call for call in calls[2:] if call["max_new_tokens"] == 8]
    first = [call.get("assistant_model") or call.get("prompt_lookup_num_tokens") for call in timed[::6]]
    assert len(set(map(str, first))) > 1  # no method is always the first
    assert all(call["max_new_tokens"] == 1 for call in calls[2::8])  # and none meets a prompt of a new length
    lengths = [row["prompt_tokens"] for row in found if row.method == "plain" and row["task"] == "conversation"]
    assert lengths[1] > lengths[0]  # the second turn repeats the first and its answer
    said = tables.tasks(tmp_path, [rows.name])
    assert re.search(
        r"^\| question answering \(2\) \| \d+\.\d\d x \|", said, re.MULTILINE
    )  # no interval of two prompts
    assert "| conversation (2) |" in said
    assert "12 of 12 outputs equal plain" in said
