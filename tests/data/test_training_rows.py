"""Rows from files: what carries the loss, and errors that name file, line and field."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chats import chat_tokenizer, texts_of_row, write_lines

from hf_domino.data import records
from hf_domino.data.row_counts import RowCounts
from hf_domino.data.rows import RowDataset, RowStream, encode_dataset, load_rows

pytestmark = pytest.mark.transformers

PLAIN_TEMPLATE = (
    "{% for m in messages %}t9 {{ m.role == 'assistant' and 't11' or 't10' }} {{ m.content }} end {% endfor %}"
    "{% if add_generation_prompt %}t9 t11 {% endif %}"
)
GENERATION_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}t9 t11 "
    "{% generation %}{{ m.content }} end{% endgeneration %} "
    "{% else %}t9 t10 {{ m.content }} end {% endif %}{% endfor %}"
)
# As GENERATION_TEMPLATE, but with reasoning (t12) in the last assistant turn alone.
LAST_GENERATION_TEMPLATE = GENERATION_TEMPLATE.replace(
    "{{ m.content }} end{%", "{{ loop.last and 't12 ' or '' }}{{ m.content }} end{%"
)
# Marks the last assistant turn, as templates do that drop the reasoning of earlier ones.
LAST_TURN_TEMPLATE = PLAIN_TEMPLATE.replace(
    "{{ m.content", "{{ loop.last and m.role == 'assistant' and 't12 ' or '' }}{{ m.content"
)
# As Qwen3's: empty reasoning (12) in the last turn, in the generation prompt where thinking is off.
MODES_TEMPLATE = LAST_TURN_TEMPLATE.replace("t9 t11 {% endif", "t9 t11 {{ '' if thinking else 't12 ' }}{% endif")
REFUSING_TEMPLATE = "{{ raise_exception('roles must alternate') }}"
USER, ANSWER, _, LAST = MESSAGES = [
    {"role": role, "content": text}
    for role, text in (("user", "t20"), ("assistant", "t30 t31"), ("user", "t21"), ("assistant", "t32"))
]
SYSTEM = {"role": "system", "content": "t22"}
FIRST, SECOND = ("t9 t10 t20 end t9 t11 t30 t31 end", "t30 t31 end"), " t9 t10 t21 end t9 t11 t32 end"
WHOLE = FIRST[0] + SECOND
BOTH = [(WHOLE, "t30 t31 end t32 end")]
SHOWN = WHOLE.replace("t32", "t12 t32"), FIRST[0].replace("t30", "t12 t30")  # with the last turn marked


@pytest.fixture
def write(tmp_path):
    """A function that writes objects to a .jsonl file."""
    return lambda *records: write_lines(tmp_path / "rows.jsonl", records)


@pytest.fixture
def rows_of(write, word_tokenizer):
    """A function that returns what the rows of a record read, and what they learn."""

    def read(*records, template=None, **options):
        rows = load_rows(write(*records), chat_tokenizer(word_tokenizer, template), **options)
        return [texts_of_row(row, word_tokenizer) for row in rows]

    return read


@pytest.mark.parametrize(
    ("record", "options", "rows"),
    [
        ({"text": "t5 t6 t7"}, {}, [("t5 t6 t7", "t5 t6 t7")]),
        ({"text": "t5 t6 t7"}, {"max_length": 2}, [("t5 t6", "t5 t6")]),
        ({"prompt": "t5 t6", "completion": "t7 t8"}, {}, [("t5 t6 t7 t8 end", "t7 t8 end")]),
        ({"input_ids": [5, 6, 7], "prompt_length": 1}, {}, [("t5 t6 t7", "t6 t7")]),
        ({"input_ids": [5, 6, 7, 8, 9], "prompt_length": 2}, {"max_length": 4}, [("t5 t6 t7 t8", "t7 t8")]),
        ({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 0]}, {}, [("t5 t6 t7", "t5 t6")]),
    ],
)
def test_what_is_read_and_what_is_learned(record, options, rows, rows_of):
    assert rows_of(record, **options) == rows


@pytest.mark.parametrize(
    ("template", "thinking", "learned"),
    [
        (LAST_TURN_TEMPLATE, False, ["t12 t32 end", "t12 t30 t31 end"]),
        (MODES_TEMPLATE, True, ["t12 t32 end", "t12 t30 t31 end"]),
        (MODES_TEMPLATE, False, ["t32 end", "t30 t31 end"]),
        (LAST_GENERATION_TEMPLATE, False, ["t12 t32 end", "t12 t30 t31 end"]),
    ],
)
def test_turns_that_are_rendered_differently_later_have_a_row_of_their_own(template, thinking, learned, rows_of):
    rows = rows_of({"messages": MESSAGES}, template=template, chat_template_kwargs={"thinking": thinking})
    assert rows == list(zip(SHOWN, learned, strict=True))


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, GENERATION_TEMPLATE], ids=["by turns", "generation block"])
@pytest.mark.parametrize(
    ("record", "rows"),
    [
        ({"messages": MESSAGES}, BOTH),
        ({"conversations": MESSAGES[:2]}, [FIRST]),
        # What stands in the prompt is no answer.
        ({"prompt": MESSAGES[:3], "completion": [LAST]}, [(WHOLE, "t32 end")]),
        ({"prompt": MESSAGES[:3], "completion": "t32"}, [(WHOLE, "t32 end")]),
        ({"prompt": [USER], "completion": MESSAGES[1:], "text": None}, BOTH),
        # What opens a chat is no answer.
        ({"messages": [LAST, *MESSAGES[:2]]}, [(f"t9 t11 t32 end {FIRST[0]}", FIRST[1])]),
        ({"messages": [SYSTEM, LAST, *MESSAGES[:2]]}, [(f"t9 t10 t22 end t9 t11 t32 end {FIRST[0]}", FIRST[1])]),
    ],
)
def test_chats_of_other_shapes(record, rows, template, rows_of):
    assert rows_of(record, template=template) == rows


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"txt": "t4"}, {}, "needs `text`, .* got `txt`"),
        ({"text": None}, {}, "needs `text`, .* got none"),
        ({"text": 3}, {}, "`text` must be a string, got 3"),
        ({"prompt": "t4"}, {}, "`completion` must be a string, .* Let the target write the answer"),
        ({"messages": MESSAGES}, {}, "needs a tokenizer with a chat template"),
        ({"messages": MESSAGES}, {"template": REFUSING_TEMPLATE}, "the chat template rejects it: roles must alternate"),
        ({"input_ids": [4, "a"]}, {}, "`input_ids` must be a list of token ids"),
        ({"input_ids": [4, 5], "prompt_length": 3}, {}, r"`prompt_length` must be in \[0, 2\], got 3"),
        ({"input_ids": [4, 5], "loss_mask": [1]}, {}, "`loss_mask` must be 2 numbers, 0 or 1"),
        ({"text": "t5 t63"}, {"vocab_size": 63}, r"token ids must be in \[0, 62\] .* got 63: use the target's own"),
    ],
)
def test_errors_name_file_line_and_field(record, options, message, rows_of):
    assert len(rows_of({"text": "t4 t62"}, vocab_size=63)) == 1
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{message}"):
        rows_of({"text": "t4 t5"}, record, **options)


def test_rows_without_an_anchor_are_left_out_and_counted(caplog):
    good, bad = ({"input_ids": [4, 5, 6], "loss_mask": mask} for mask in ([0, 1, 1], [1, 0, 1]))
    assert list(RowDataset([good, bad, good, bad])) == [good, good]
    assert "2 of 4 rows are left out, the first is rows[1]" in caplog.text
    caplog.clear()
    assert RowDataset([good]).counts == RowCounts(1, 1, 3)
    assert not caplog.records
    with pytest.raises(ValueError, match="none in 0 rows"):
        RowDataset([])


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
    file, other = write(*RECORDS), copy.deepcopy(word_tokenizer)
    other.add_tokens(["t64"])
    chat = chat_tokenizer(word_tokenizer, "{{ messages[0].content }}")
    begins = copy.deepcopy(word_tokenizer)
    begins.bos_token = "t9"  # which a template can render
    changes = (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"max_length": 2},
        {"vocab_size": 64},
        {"max_rows": 3},
    )
    calls = [
        (word_tokenizer, {}),
        (other, {}),
        (chat, {}),
        (begins, {}),
        *((word_tokenizer, change) for change in changes),
    ]
    for number, (tokenizer, change) in enumerate(calls, start=1):
        first, again = (load_rows(file, tokenizer, **change) for _ in range(2))
        assert len(times_read) == number, change
        assert (list(first), first.counts) == (list(again), again.counts)
    assert caplog.text.count("1 of 4 rows are left out, the first is ") == 14  # a later run is told as well
    file.write_text(file.read_text().replace("t8", "t9"))
    assert load_rows(file, word_tokenizer)[2]["input_ids"] == [9] * 9


def test_rows_that_were_broken_off_are_not_taken(write, times_read, word_tokenizer, monkeypatch):
    file, read = write(*RECORDS), records.read_records

    def broken_off(path):
        yield from itertools.islice(read(path), 2)
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(records, "read_records", broken_off)
        with pytest.raises(OSError, match=r"^no space left$"):
            load_rows(file, word_tokenizer)
    assert len(load_rows(file, word_tokenizer)) == 3
    assert len(times_read) == 2


def test_rows_are_written_by_one_process_while_the_others_wait(write, times_read, word_tokenizer, monkeypatch):
    file, read = write(*RECORDS), records.read_records
    monkeypatch.setattr(records, "read_records", lambda path: time.sleep(0.3) or read(path))
    with ThreadPoolExecutor(3) as processes:
        found = [processes.submit(load_rows, file, word_tokenizer) for _ in range(3)]
    assert [len(rows.result()) for rows in found] == [3, 3, 3]
    assert len(times_read) == 1


def test_a_long_stream_remembers_no_more_rows_than_it_says(word_tokenizer, monkeypatch, caplog):
    monkeypatch.setattr("hf_domino.data.rows.MOST_SEEN", 2)
    texts = ["t4 t5", "t6 t7", "t8 t9", "t4 t5", "t8 t9"]
    rows = list(RowStream([{"text": text} for text in texts], "stream", word_tokenizer))
    assert len(rows) == 5
    assert "1 of 5 rows are equal to an earlier one" in caplog.text


def test_rows_are_counted_by_why_they_are_left_out(write, word_tokenizer):
    file = write(*RECORDS, {"text": "t9"})
    counts = load_rows(file, word_tokenizer, max_length=4).counts
    assert counts == RowCounts(5, 3, 10, cut=1, copies=1, without_anchor=2, first_left_out=f"{file}, line 2")
    assert counts.describe().startswith(f"2 of 5 rows are left out, the first is {file}, line 2: 2 without two")
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

    options = {"tokenizer": word_tokenizer, "max_length": 6, "vocab_size": 64}
    rows = encode_dataset(Dataset.from_list(RECORDS), "train_dataset", **options)
    in_memory = encode_dataset({"a": RECORDS}, "eval_dataset", **options)["a"]
    assert list(in_memory) == list(rows)
    assert rows.rows.cache_files
    assert not in_memory.rows.cache_files
    with pytest.raises(ValueError, match=r"eval_dataset\['a'\]\[0\]: needs `text`"):
        encode_dataset({"a": [{}]}, "eval_dataset", **options)
    assert encode_dataset(rows, "train_dataset", **options) is rows
    dataset = RowDataset(Dataset.from_list([rows[0], {"input_ids": [4], "loss_mask": [1]}]))
    assert list(dataset) == [rows[0]]
