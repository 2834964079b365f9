"""Rows from files: what carries the loss, and errors that name file, line and field."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from hf_domino.data.rows import RowDataset, collate_rows, load_rows

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


def test_prompts_without_an_answer_are_for_the_target(write, word_tokenizer):
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE
    prompts = [{"prompt": "t4 t5"}, {"prompt": MESSAGES[:1]}, {"messages": MESSAGES[:3]}, {"prompt": "t6 " * 20}]
    path = write(*prompts, {"prompt": "t4", "completion": "t5"}, {"text": "t7 t8 t9"})
    rows = load_rows(path, tokenizer, as_prompts=True, max_length=19)
    asked = [[4, 5], [9, 10, 20, 1, 9, 11], [9, 10, 20, 1, 9, 11, 30, 31, 1, 9, 10, 21, 1, 9, 11], [4], [7, 8]]
    assert rows.prompts(2) == asked
    assert (rows.counts.rows, rows.counts.too_long) == (5, 1)
    for prompt in [*prompts[:2], {"messages": MESSAGES[:1]}]:
        with pytest.raises(ValueError, match=r"line 2: .*Let the target write the answer \(on_policy"):
            load_rows(write({"text": "t4 t5"}, prompt), tokenizer)


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
    ids, loss_mask = only_row(write({"messages": [{"role": "assistant", "content": "t40"}, *MESSAGES[:2]]}), tokenizer)
    assert [token for token, supervised in zip(ids, loss_mask, strict=True) if supervised] == [30, 31, 1]


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


def test_a_json_file_holds_a_list_or_lines(tmp_path, word_tokenizer):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "t5 t6"}, {"text": "t7 t8"}], indent=1))
    assert [row["input_ids"] for row in load_rows(path, word_tokenizer).rows] == [[5, 6], [7, 8]]
    path.write_text('{"text": "t5 t6"}\n{"text": "t7 t8"}\n')
    assert len(load_rows(path, word_tokenizer)) == 2
    path.write_text('[{"text": "t5 t6"}, 3]')
    with pytest.raises(ValueError, match=r"rows\.json, item 2: must be a JSON object, got int"):
        load_rows(path, word_tokenizer)
    path.write_text('[\n{"text": "t5 t6"},\n{"text": }]')
    with pytest.raises(ValueError, match=r"rows\.json, line 3: must be a JSON list of objects"):
        load_rows(path, word_tokenizer)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.txt"])
def test_bytes_that_are_not_utf8_are_named_by_line(name, tmp_path, word_tokenizer):
    path = tmp_path / name
    path.write_bytes(b'{"text": "t4 t5"}\n{"text": "t5 caf\xe9 t6"}\n')
    with pytest.raises(ValueError, match=rf"{name}, line 2: must be UTF-8, got byte 0xe9"):
        load_rows(path, word_tokenizer)


def test_ids_beyond_the_vocabulary(write, word_tokenizer):
    path = write({"text": "t4 t5 t63"}, {"input_ids": [4, 64, 5]})
    assert len(load_rows(path, word_tokenizer)) == 2
    with pytest.raises(ValueError, match=r"line 2: token ids must be in \[0, 63\] .*, got 64"):
        load_rows(path, word_tokenizer, vocab_size=64)
    with pytest.raises(ValueError, match=r"line 1: token ids must be in \[0, 62\] .*, got 63"):
        load_rows(path, word_tokenizer, vocab_size=63)


def test_token_ids(write):
    assert only_row(write({"input_ids": [5, 6, 7], "prompt_length": 1})) == ([5, 6, 7], [0, 1, 1])
    assert only_row(write({"input_ids": [5, 6, 7], "loss_mask": [1, 1, 0]})) == ([5, 6, 7], [1, 1, 0])


def test_a_text_file_is_cut_into_rows(tmp_path, word_tokenizer):
    path = tmp_path / "text.txt"
    path.write_text("t4 t5 t6 t7 t8")
    rows = load_rows(path, word_tokenizer, max_length=2).rows
    assert [row["input_ids"] for row in rows] == [[4, 5], [6, 7]]  # the last piece holds no anchor


def test_rows_without_an_anchor_are_left_out_and_counted(caplog):
    good = {"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}
    bad = {"input_ids": [4, 5, 6], "loss_mask": [1, 0, 1]}
    assert RowDataset([good, bad, good, bad]).rows == [good, good]
    (record,) = caplog.records
    assert record.message.startswith("2 of 4 rows are left out, the first is row 2")
    caplog.clear()
    assert len(RowDataset([good])) == 1
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
        ("{'a': 1}", "must be a JSON object"),
        ("[1]", "must be a JSON object, got list"),
        ({"txt": "t4"}, "needs `text`, .* got `txt`"),
        ({"text": 3}, "field `text` must be a string, got 3"),
        ({"text": None}, "needs `text`, .* got none"),
        ({"prompt": "t4"}, "field `completion` must be a string, got None"),
        ({"messages": []}, "field `messages` must be a list of messages"),
        ({"messages": [{"role": "user"}]}, r"field `messages\[0\]` must have `role` and `content`"),
        ({"messages": [{"role": "user", "content": "t4"}]}, "must hold an assistant message"),
        (
            {"conversations": [{"from": "me", "value": "t4"}]},
            r"field `conversations\[0\]` must have `value` and `from`",
        ),
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
