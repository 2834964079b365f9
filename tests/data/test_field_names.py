"""Names that change the loss or the prompt: each is read, or refused by name."""

from __future__ import annotations

import pytest
from chats import TEMPLATE, chat_tokenizer, texts_of_row, write_lines
from datasets import Dataset

from hf_domino.data.names import CHAT, IDS, MESSAGE, NAMES, TEXT
from hf_domino.data.records import from_table
from hf_domino.data.rows import load_rows
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.check.prompts import prepare_prompts
from hf_domino.pair import read_prompts

MASKED = "{% if mood %}({{ mood }}){% endif %}" + TEMPLATE
USER, ANSWER, AGAIN, LAST = MESSAGES = [
    {"role": role, "content": text}
    for role, text in (("user", "a"), ("assistant", "well"), ("user", "ab"), ("assistant", "fine"))
]
ASKED = "<mask>user: a<eos><mask>assistant: "
READ = f"{ASKED}well<eos><mask>user: ab<eos><mask>assistant: fine<eos>"
BLOCKS = (
    "{% if mood %}({{ mood }}){% endif %}{% for m in messages %}<mask>{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<mask>assistant: {% endif %}"
)


@pytest.fixture
def rows_of(tiny_tokenizer, tmp_path):
    """A function that returns what the rows of a record read and learn."""

    def read(record, template=MASKED):
        rows = load_rows(write_lines(tmp_path / "rows.jsonl", [record]), chat_tokenizer(tiny_tokenizer, template))
        return [texts_of_row(row, tiny_tokenizer) for row in rows]

    return read


@pytest.mark.parametrize(
    ("fields", "read", "learned"),
    [
        ({"labels": [-100, 5, 6, 7, -100]}, "abcde", "bcd"),
        ({"completion_mask": [0, 1, 1, 1, 0]}, "abcde", "bcd"),
        ({"assistant_masks": [0, 0, 1, 1, 1], "completion_mask": [0, 1, 1, 1, 1]}, "abcde", "cde"),
        ({"loss_mask": [1, 1, 1, 1, 0], "prompt_length": 2}, "abcde", "cd"),
        ({"attention_mask": [0, 0, 1, 1, 1], "prompt_length": 3}, "cde", "de"),
        ({"attention_mask": [1, 1, 1, 0, 0]}, "abc", "abc"),
        ({"weight": 1.0, "train": True, "loss": None}, "abcde", "abcde"),
        ({"system": "rhyme", "tools": [{}], "messages": []}, "abcde", "abcde"),  # the ids hold them already
    ],
)
def test_masks_of_token_ids(fields, read, learned, rows_of):
    assert rows_of({"input_ids": [4, 5, 6, 7, 8], **fields}) == [(read, learned)]


@pytest.mark.parametrize("template", [MASKED, BLOCKS], ids=["by turns", "generation block"])
@pytest.mark.parametrize(
    ("record", "before", "learned"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0}, AGAIN, LAST]}, "", "fine<eos>"),
        ({"messages": [USER, {**ANSWER, "train": True}, AGAIN, {**LAST, "train": False}]}, "", "well<eos>"),
        ({"messages": [{**USER, "loss": False}, {**ANSWER, "loss": True}, AGAIN, LAST]}, "", "well<eos>fine<eos>"),
        ({"messages": MESSAGES, "system": "sys"}, "<mask>system: sys<eos>", "well<eos>fine<eos>"),
        ({"messages": MESSAGES, "system_prompt": "sys", "system": ""}, "<mask>system: sys<eos>", "well<eos>fine<eos>"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"mood": "calm"}}, "(calm)", "well<eos>fine<eos>"),
        ({"messages": MESSAGES, "chat_template_kwargs": '{"mood": "calm"}'}, "(calm)", "well<eos>fine<eos>"),
        ({"messages": MESSAGES, "labels": 3, "weight": 1, "topic": "none"}, "", "well<eos>fine<eos>"),
    ],
)
def test_weights_of_turns_and_what_the_template_is_told(record, before, learned, template, rows_of):
    assert rows_of(record, template) == [(before + READ, learned)]


def test_weights_in_conversations_of_from_and_value(rows_of):
    speakers = {"user": "human", "assistant": "gpt"}
    said = [{"from": speakers[m["role"]], "value": m["content"]} for m in MESSAGES]
    assert rows_of({"conversations": [said[0], {**said[1], "weight": 0}, *said[2:]]}) == [(READ, "fine<eos>")]


IDS_OF_FIVE = {"input_ids": [4, 5, 6, 7, 8]}
STRINGS = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**IDS_OF_FIVE, "labels": [-100, 5, 6, 7, 9]}, "`labels` must be 5 numbers, -100 or that of `input_ids`"),
        ({**IDS_OF_FIVE, "completion_mask": [1]}, "`completion_mask` must be 5 numbers, 0 or 1"),
        (
            {**IDS_OF_FIVE, "attention_mask": [1, 0, 1, 1, 1]},
            "`attention_mask` must be 0 only before and after the text",
        ),
        ({**IDS_OF_FIVE, "position_ids": [0, 1, 0, 1, 2]}, "`position_ids` changes what the target reads"),
        ({**IDS_OF_FIVE, "weight": "half"}, "`weight` must be 0 or 1"),
        ({"messages": MESSAGES, "weight": "half"}, "`weight` must be 0 or 1 .*, got half"),
        ({"text": "abc", "loss": "all"}, "`loss` must be 0 or 1 .*, got all"),
        ({"messages": MESSAGES, "assistant_masks": [1]}, "`assistant_masks` changes what is learned, .* in a chat"),
        ({"messages": [USER, {**ANSWER, "weight": "half"}]}, r"messages\[1\]`: field `weight` must be 0 or 1"),
        ({"messages": [{**USER, "train": True}, ANSWER]}, r"messages\[0\]`: .*only what the assistant says is learned"),
        ({"messages": [USER, {**ANSWER, "train_detail": [[0, 1]]}]}, r"messages\[1\]`: field `train_detail` changes"),
        ({"messages": MESSAGES, "images": ["a.png"]}, "`images` changes what the target reads"),
        ({"messages": MESSAGES, "functions": [{}]}, "`functions` changes what the target reads, .* Name them `tools`"),
        ({"messages": MESSAGES, "system": ["sys"]}, "`system` .* must be one string"),
        ({"messages": MESSAGES, "system": "a", "system_prompt": "b"}, "must be one string"),
        (
            {"messages": [{"role": "system", "content": "other"}, *MESSAGES], "system": "sys"},
            "`system` must equal the chat's own system turn, got sys",
        ),
        ({"messages": MESSAGES, "chat_template_kwargs": "calm"}, "`chat_template_kwargs` must be an object, or JSON"),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"add_generation_prompt": True}},
            "chat_template_kwargs must be variables of the chat template, got 'add_generation_prompt'",
        ),
        ({**STRINGS, "system": "sys"}, "`system` changes what the target reads, and is not read in a text"),
        (
            {**STRINGS, "tools": [{}]},
            "`tools` changes what the target reads, and is not read in a text, .* beside a chat",
        ),
        ({"text": "abc", "loss_mask": [1, 1, 0]}, "`loss_mask` changes what is learned, .* beside `input_ids`"),
    ],
)
def test_what_is_not_read_is_refused_by_name(record, message, rows_of):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 1: .*{message}"):
        rows_of(record)


@pytest.mark.parametrize("name", ["weight", "train", "training", "loss", "loss_weight", "loss_scale"])
@pytest.mark.parametrize(
    "record", [{"text": "abc"}, {**IDS_OF_FIVE}, {"messages": MESSAGES}, {"messages": [USER, ANSWER]}]
)
def test_a_record_without_weight_is_left_out_and_counted(name, record, tiny_tokenizer):
    is_last = record.get("messages") == [USER, ANSWER]
    without = {"messages": [USER, {**ANSWER, name: 0}]} if is_last else {**record, name: 0}
    rows = load_rows(from_table([{"text": "abc"}, without], "list"), chat_tokenizer(tiny_tokenizer))
    assert (rows.counts.records, rows.counts.rows, rows.counts.without_anchor) == (2, 1, 1)


@pytest.mark.parametrize(("name", "value"), [("loss", 2.31), ("weight", 0.37), ("loss_scale", 512)])
@pytest.mark.parametrize("is_of_message", [False, True])
def test_a_number_that_is_no_weight_is_a_note(name, value, is_of_message, tiny_tokenizer):
    note = {name: value}
    record = {"messages": [USER | note, ANSWER | note]} if is_of_message else {"text": "abc"} | note
    plain = {"messages": [USER, ANSWER]} if is_of_message else {"text": "abc"}
    (noted, same) = load_rows(from_table([record, plain], "list"), chat_tokenizer(tiny_tokenizer))
    assert noted == same


def test_columns_of_a_table_are_read_too(tiny_tokenizer):
    tokenizer = chat_tokenizer(tiny_tokenizer)
    table = Dataset.from_list([{"messages": MESSAGES, "system": "sys", "topic": "none"}, {"messages": MESSAGES}])
    rows = [texts_of_row(row, tokenizer)[0] for row in load_rows(from_table(table, "table"), tokenizer)]
    assert rows == [f"<mask>system: sys<eos>{READ}", READ]


def test_bench_and_check_ask_with_what_the_record_tells_the_template(tiny_tokenizer, tmp_path):
    tokenizer = chat_tokenizer(tiny_tokenizer, MASKED)
    record = {"messages": [USER], "system": "sys", "chat_template_kwargs": '{"mood": "calm"}'}
    prompts = read_prompts(write_lines(tmp_path / "prompts.jsonl", [record]))
    (checked,) = prepare_prompts(None, tokenizer, prompts)
    asked = {tokenizer.decode(ids) for ids in (encode(tokenizer, prompts)["input_ids"][0], checked.input_ids[0])}
    assert asked == {f"(calm)<mask>system: sys<eos>{ASKED}"}


def test_every_name_is_read_or_refused_somewhere():
    for name, known in NAMES.items():
        assert known.read or known.refused, name
        assert not set(known.read) & set(known.refused), name
        assert set(known.read + known.refused) <= {IDS, CHAT, TEXT, MESSAGE}, name
