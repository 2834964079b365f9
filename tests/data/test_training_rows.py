"""Rows from files: what carries the loss, and errors that name file, line and field."""

from __future__ import annotations

import copy
import json
import sys
import threading
from pathlib import Path

import pytest
import torch

from hf_domino.data import records
from hf_domino.data.packing import collate_rows
from hf_domino.data.rows import RowCounts, RowDataset, encode_dataset, load_rows

PLAIN_TEMPLATE = (
    "{% for m in messages %}t9 {{ m.role == 'user' and 't10' or 't11' }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}t9 t11 {% endif %}"
)
GENERATION_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}t9 t11 "
    "{% generation %}{{ m.content }} end{% endgeneration %} "
    "{% else %}t9 t10 {{ m.content }} end {% endif %}{% endfor %}"
)
# Marks the last assistant turn, as templates do that drop the reasoning of earlier ones.
LAST_TURN_TEMPLATE = (
    "{% for m in messages %}t9 {{ m.role == 'user' and 't10' or 't11' }} "
    "{{ loop.last and m.role == 'assistant' and 't12 ' or '' }}{{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}t9 t11 {% endif %}"
)
# As templates do that want user and assistant in turn.
REFUSING_TEMPLATE = (
    "{% if messages and messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + PLAIN_TEMPLATE
)
MESSAGES = [
    {"role": "user", "content": "t20"},
    {"role": "assistant", "content": "t30 t31"},
    {"role": "user", "content": "t21"},
    {"role": "assistant", "content": "t32"},
]


@pytest.fixture
def write(tmp_path):
    """A function that writes objects, or raw lines, to a .jsonl file."""

    def to_file(*lines):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return to_file


def only_row(path, tokenizer=None, **kwargs):
    (row,) = load_rows(path, tokenizer, **kwargs)
    return row["input_ids"], row["loss_mask"]


def supervised(row):
    return [token for token, scored in zip(row["input_ids"], row["loss_mask"], strict=True) if scored]


def test_text(write, word_tokenizer):
    assert only_row(write({"text": "t5 t6 t7"}), word_tokenizer) == ([5, 6, 7], [1, 1, 1])
    assert only_row(write({"text": "t5 t6 t7"}), word_tokenizer, max_length=2) == ([5, 6], [1, 1])


def test_prompt_and_completion(write, word_tokenizer):
    row = only_row(write({"prompt": "t5 t6", "completion": "t7 t8"}), word_tokenizer)
    assert row == ([5, 6, 7, 8, 1], [0, 0, 1, 1, 1])


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, GENERATION_TEMPLATE])
@pytest.mark.parametrize(
    ("record", "learned"),
    [
        ({"conversations": [{"from": "human", "value": "t20"}, {"from": "gpt", "value": "t30"}]}, [30, 1]),
        ({"conversations": MESSAGES}, [30, 31, 1, 32, 1]),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]}, [30, 31, 1]),
        ({"prompt": MESSAGES[:3], "completion": MESSAGES[3:]}, [32, 1]),  # what stands in the prompt is no answer
        ({"prompt": MESSAGES[:3], "completion": "t32"}, [32, 1]),
        ({"prompt": MESSAGES[:1], "completion": MESSAGES[1:], "text": None}, [30, 31, 1, 32, 1]),
    ],
)
def test_conversations_of_other_shapes(record, learned, template, write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = template
    assert [supervised(row) for row in load_rows(write(record), tokenizer)] == [learned]


def test_the_template_is_told_the_mode(write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    # As templates do that let the model think first, unless they are asked not to.
    tokenizer.chat_template = PLAIN_TEMPLATE.replace("{{ m.content }}", "{{ thinking and 't40' }} {{ m.content }}")
    modes = [
        load_rows(write({"messages": MESSAGES}), tokenizer, chat_template_kwargs={"thinking": on}) for on in (0, 1)
    ]
    assert [40 in rows[0]["input_ids"] for rows in modes] == [False, True]


@pytest.mark.parametrize(
    ("thinking", "learned"), [(True, [[12, 32, 1], [12, 30, 31, 1]]), (False, [[32, 1], [30, 31, 1]])]
)
def test_empty_reasoning_is_learned_only_where_the_target_writes_it(thinking, learned, write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    # As Qwen3's: empty reasoning (12) in the last turn, in the generation prompt where thinking is off.
    prompt = "t9 t11 {{ '' if thinking else 't12 ' }}{% endif %}"
    tokenizer.chat_template = LAST_TURN_TEMPLATE.replace("t9 t11 {% endif %}", prompt)
    rows = load_rows(write({"messages": MESSAGES}), tokenizer, chat_template_kwargs={"thinking": thinking})
    assert [supervised(row) for row in rows] == learned


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, GENERATION_TEMPLATE])
def test_chat_puts_the_loss_on_assistant_tokens(template, write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = template
    ids, loss_mask = only_row(write({"messages": MESSAGES}), tokenizer)
    assert ids == [9, 10, 20, 1, 9, 11, 30, 31, 1, 9, 10, 21, 1, 9, 11, 32, 1]
    assert [token for token, supervised in zip(ids, loss_mask, strict=True) if supervised] == [30, 31, 1, 32, 1]


def test_turns_that_are_rendered_differently_later_have_a_row_of_their_own(write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = LAST_TURN_TEMPLATE
    rows = load_rows(write({"messages": MESSAGES}), tokenizer)
    assert [supervised(row) for row in rows] == [[12, 32, 1], [12, 30, 31, 1]]
    assert rows[1]["input_ids"] == [9, 10, 20, 1, 9, 11, 12, 30, 31, 1]
    assert (rows.counts.records, rows.counts.rows) == (1, 2)


def test_a_turn_that_opens_the_conversation_carries_no_loss(write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE
    (row,) = load_rows(write({"messages": [{"role": "assistant", "content": "t40"}, *MESSAGES[:2]]}), tokenizer)
    assert supervised(row) == [30, 31, 1]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (REFUSING_TEMPLATE, [MESSAGES[1], *MESSAGES[:2]], "the chat template refuses it: roles must alternate"),
        (None, MESSAGES, "needs a tokenizer with a chat template"),
    ],
)
def test_errors_of_templates_name_the_line(template, messages, message, write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{message}"):
        load_rows(write({"text": "t4 t5"}, {"messages": messages}), tokenizer)


def test_ids_beyond_the_vocabulary(write, word_tokenizer):
    path = write({"text": "t4 t5 t63"}, {"input_ids": [4, 64, 5]})
    assert len(load_rows(path, word_tokenizer)) == 2
    with pytest.raises(ValueError, match=r"line 2: token ids must be in \[0, 63\] .*, got 64"):
        load_rows(path, word_tokenizer, vocab_size=64)
    with pytest.raises(ValueError, match=r"line 1: token ids must be in \[0, 62\] .*, got 63"):
        load_rows(path, word_tokenizer, vocab_size=63)


def test_token_ids(write):
    assert only_row(write({"input_ids": [5, 6, 7], "prompt_length": 1})) == ([5, 6, 7], [0, 1, 1])
    assert only_row(write({"input_ids": [5, 6, 7, 8, 9], "prompt_length": 2}), max_length=4)[1] == [0, 0, 1, 1]
    assert only_row(write({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 0]})) == ([5, 6, 7], [1, 1, 0])


def test_rows_without_an_anchor_are_left_out_and_counted(caplog):
    good = {"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}
    bad = {"input_ids": [4, 5, 6], "loss_mask": [1, 0, 1]}
    assert list(RowDataset([good, bad, good, bad])) == [good, good]
    (record,) = caplog.records
    assert record.message.startswith("2 of 4 rows are left out, the first is row 2")
    caplog.clear()
    assert RowDataset([good]).counts == RowCounts(1, 1, 3)
    assert not caplog.records
    with pytest.raises(ValueError, match="none in 0 rows"):
        RowDataset([])


def test_collated_rows_are_padded_on_the_right():
    batch = collate_rows([{"input_ids": [4, 5], "loss_mask": [0, 1]}, {"input_ids": [6], "loss_mask": [1]}], 2)
    assert batch["input_ids"].tolist() == [[4, 5], [6, 2]]
    assert batch["loss_mask"].tolist() == [[0, 1], [1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    with pytest.raises(ValueError, match="rows must have `input_ids` and `loss_mask`, got `messages`"):
        collate_rows([{"messages": MESSAGES}])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"txt": "t4"}, "needs `text`, .* got `txt`"),
        ({"text": 3}, "field `text` must be a string, got 3"),
        ({"text": None}, "needs `text`, .* got none"),
        ({"prompt": "t4"}, "field `completion` must be a string, got None. Let the target write the answer"),
        ({"messages": MESSAGES}, "needs a tokenizer with a chat template"),
        ({"input_ids": [4, "a"]}, "field `input_ids` must be a list of token ids"),
        ({"input_ids": [4, 5], "prompt_length": 3}, r"field `prompt_length` must be in \[0, 2\], got 3"),
        ({"input_ids": [4, 5], "loss_mask": [1]}, "field `loss_mask` must be 2 zeros and ones"),
    ],
)
def test_errors_name_file_line_and_field(line, message, write, word_tokenizer):
    path = write({"text": "t4 t5"}, "", line)
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3: .*{message}"):
        load_rows(path, word_tokenizer)


# --- rows on disk: written once, read memory-mapped, known again by all that decides what they are --------------------

RECORDS = [{"text": "t4 t5 t6"}, {"text": "t7"}, {"text": "t4 t5 t6"}, {"text": "t8 " * 9}]


@pytest.fixture
def times_read(monkeypatch, tmp_path):
    """How often files were read, and a cache of their rows that is empty."""
    import datasets

    calls, read = [], records.read_records
    monkeypatch.setattr(records, "read_records", lambda path: calls.append(path) or read(path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return calls


def test_rows_are_read_once_by_all_that_decides_what_they_are(write, times_read, word_tokenizer, caplog):
    file, other, chat = write(*RECORDS), copy.deepcopy(word_tokenizer), copy.deepcopy(word_tokenizer)
    other.add_tokens(["t64"])
    chat.chat_template = "{{ messages[0].content }}"
    for tokenizer, change in (
        (word_tokenizer, {}),
        (other, {}),
        (chat, {}),
        (chat, {"chat_template_kwargs": {"enable_thinking": False}}),
        (word_tokenizer, {"max_length": 2}),
        (word_tokenizer, {"vocab_size": 64}),
        (word_tokenizer, {"max_rows": 3}),
    ):
        before = len(times_read)
        first, again = (load_rows(file, tokenizer, **change) for _ in range(2))
        assert len(times_read) == before + 1, change
        assert (list(first), first.counts) == (list(again), again.counts)
    assert caplog.text.count("1 of 4 rows are left out, the first is ") == 12  # a later run is told as well
    file.write_text(file.read_text().replace("t8", "t9"))
    assert load_rows(file, word_tokenizer)[2]["input_ids"] == [9] * 9


def test_rows_that_were_broken_off_are_not_taken(write, times_read, word_tokenizer, monkeypatch):
    file = write(*RECORDS)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load_rows(file, word_tokenizer)
    assert len(load_rows(file, word_tokenizer)) == 3
    assert len(times_read) == 2


def test_rows_are_written_by_one_process_while_the_others_wait(write, times_read, word_tokenizer, monkeypatch):
    file, begun, go_on, read = write(*RECORDS), threading.Event(), threading.Event(), records.read_records

    def read_slowly(path):
        begun.set()
        assert go_on.wait(20)
        return read(path)

    monkeypatch.setattr(records, "read_records", read_slowly)
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
    assert len(times_read) == 1


def test_rows_are_counted_by_why_they_are_left_out(write, word_tokenizer):
    file = write(*RECORDS, {"text": "t9"})
    counts = load_rows(file, word_tokenizer, max_length=4).counts
    first = f"{file}, line 2"
    assert counts == RowCounts(5, 3, 10, cut=1, copies=1, without_anchor=2, first_left_out=first)
    assert counts.describe().startswith(f"2 of 5 rows are left out, the first is {first}: 2 without two")
    assert counts.describe().endswith("1 of 3 rows are cut at max_length. 1 of 3 rows are equal to an earlier one.")


def test_rows_are_no_python_lists(write):
    path = write(*[{"input_ids": list(range(1000, 2000))}] * 60)
    load_rows(path, max_rows=1)  # what is imported first is not counted
    before = sys.getallocatedblocks()
    rows = load_rows(path)
    assert len(rows) == 60
    assert sys.getallocatedblocks() - before < 10_000  # as lists, they were 60,000 integers
    (cached,) = [Path(entry["filename"]) for entry in rows.rows.cache_files]
    assert cached.stat().st_size / 60_000 == pytest.approx(5, abs=0.2)  # bytes a token


def test_records_of_a_table_are_cached_and_those_of_a_list_kept_in_memory(word_tokenizer):
    from datasets import Dataset

    rows = encode_dataset(Dataset.from_list(RECORDS), word_tokenizer, 6, 64, "train_dataset")
    in_memory = encode_dataset({"a": RECORDS}, word_tokenizer, 6, 64, "eval_dataset")["a"]
    assert list(in_memory) == list(rows)
    assert rows.rows.cache_files
    assert not in_memory.rows.cache_files
    with pytest.raises(ValueError, match=r"eval_dataset\['a'\]\[0\]: needs `text`"):
        encode_dataset({"a": [{}]}, word_tokenizer, 6, 64, "eval_dataset")
    assert encode_dataset(rows, word_tokenizer, 6, 64, "train_dataset") is rows


def test_a_table_of_rows_stays_one():
    from datasets import Dataset

    rows = [{"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}, {"input_ids": [4], "loss_mask": [1]}]
    dataset = RowDataset(Dataset.from_list(rows))
    assert list(dataset) == rows[:1]
    assert dataset.lengths == [3]
