"""Rows on disk: written once, read memory-mapped, known again by all that decides what they are."""

from __future__ import annotations

import copy
import json
import sys
import threading
from pathlib import Path

import pytest

from hf_domino.data import rows as rows_module
from hf_domino.data import tables
from hf_domino.data.rows import RowDataset, encode_dataset, load_rows

RECORDS = [{"text": "t4 t5 t6"}, {"text": "t7"}, {"text": "t4 t5 t6"}, {"text": "t8 " * 9}]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


@pytest.fixture
def encoded(monkeypatch):
    """How often sources were encoded."""
    calls = []
    encode = rows_module._encode
    monkeypatch.setattr(rows_module, "_encode", lambda *args: calls.append(args) or encode(*args))
    return calls


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_rows_are_tokenized_once(file, encoded, cache, word_tokenizer, caplog):
    first, again = (load_rows(file, word_tokenizer, max_length=6) for _ in range(2))
    assert len(encoded) == 1
    assert list(first) == list(again)
    assert first.counts == again.counts
    assert caplog.text.count("1 of 4 rows are left out, the first is ") == 2  # a later run is told as well


def test_what_decides_the_rows_is_part_of_what_they_are_known_by(file, encoded, cache, word_tokenizer):
    other = copy.deepcopy(word_tokenizer)
    other.add_tokens(["t64"])
    chat = copy.deepcopy(word_tokenizer)
    chat.chat_template = "{{ messages[0].content }}"
    for tokenizer, change in (
        (word_tokenizer, {}),
        (other, {}),
        (chat, {}),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}),
        (word_tokenizer, {"max_length": 2}),
        (word_tokenizer, {"vocab_size": 64}),
        (word_tokenizer, {"max_rows": 3}),
        (word_tokenizer, {"as_prompts": True}),
        (word_tokenizer, {"drop_duplicates": True}),
    ):
        before = len(encoded)
        load_rows(file, tokenizer, **change)
        load_rows(file, tokenizer, **change)
        assert len(encoded) == before + 1, change
    file.write_text(file.read_text().replace("t8", "t9"))
    assert load_rows(file, word_tokenizer)[2]["input_ids"] == [9] * 9


def test_what_is_left_of_an_interrupted_reading_is_not_taken(file, encoded, cache, word_tokenizer, monkeypatch):
    def write_some(rows, sink):
        next(iter(rows))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tables, "_write", write_some)
        with pytest.raises(KeyboardInterrupt):
            load_rows(file, word_tokenizer)
    assert len(load_rows(file, word_tokenizer)) == 3
    assert len(encoded) == 2


def test_rows_are_written_by_one_process_while_the_others_wait(file, encoded, cache, word_tokenizer, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    encode = rows_module._encode

    def encode_slowly(*args):
        begun.set()
        assert go_on.wait(20)
        return encode(*args)

    monkeypatch.setattr(rows_module, "_encode", encode_slowly)
    found: list[RowDataset] = []
    processes = [threading.Thread(target=lambda: found.append(load_rows(file, word_tokenizer))) for _ in range(3)]
    processes[0].start()
    assert begun.wait(20)
    for process in processes[1:]:
        process.start()
    go_on.set()
    for process in processes:
        process.join(20)
    assert [len(rows) for rows in found] == [3, 3, 3]
    assert len(encoded) == 1


def test_rows_are_counted_by_why_they_are_left_out(file, word_tokenizer):
    counts = load_rows(file, word_tokenizer, max_length=4, drop_duplicates=True).counts
    assert (counts.records, counts.rows, counts.tokens, counts.cut) == (4, 2, 7, 1)
    assert (counts.without_anchor, counts.duplicates, counts.left_out) == (1, 1, 2)
    assert counts.first_left_out == f"{file}, line 2"
    assert counts.describe().startswith(f"2 of 4 rows are left out, the first is {file}, line 2: 1 without two")
    assert counts.describe().endswith("1 of 2 rows are cut at max_length.")


def test_rows_are_no_python_lists(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"input_ids": list(range(1000, 2000))})
    path.write_text(f"{row}\n" * 60)
    load_rows(path, max_rows=1)  # what is imported first is not counted
    before = sys.getallocatedblocks()
    rows = load_rows(path)
    assert len(rows) == 60
    assert sys.getallocatedblocks() - before < 10_000  # as lists, they were 60,000 integers
    (cached,) = [Path(entry["filename"]) for entry in rows.rows.cache_files]
    assert cached.stat().st_size / 60_000 == pytest.approx(5, abs=0.2)  # bytes a token


def test_records_of_a_table_are_tokenized_once_and_those_of_a_list_kept_in_arrow(encoded, word_tokenizer):
    from datasets import Dataset

    for _ in range(2):
        rows = encode_dataset(Dataset.from_list(RECORDS), word_tokenizer, 6, 64, "train_dataset")
    assert len(encoded) == 1
    assert rows.rows.cache_files
    in_memory = encode_dataset(RECORDS, word_tokenizer, 6, 64, "train_dataset")
    assert list(in_memory) == list(rows)
    assert not isinstance(in_memory.rows, list)


def test_a_table_of_rows_stays_one():
    from datasets import Dataset

    rows = [{"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1]}]
    dataset = RowDataset(Dataset.from_list(rows))
    assert list(dataset) == rows[:1]
    assert isinstance(dataset.rows, Dataset)
