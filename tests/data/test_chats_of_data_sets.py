"""Chats as data sets have them: tools and calls, nulls that tables fill in, modes, and what is no answer."""

from __future__ import annotations

import json

import pytest
from builders import EOS
from chats import TEMPLATE, ScriptedWriter, chat_tokenizer, texts_of_row, write_lines
from transformers import AutoTokenizer

from hf_domino.data.chat import read_messages
from hf_domino.data.records import from_table
from hf_domino.data.rows import load_rows
from hf_domino.data.settings import WritingSettings
from hf_domino.data.writing import write_data
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.check.prompts import prepare_prompts
from hf_domino.pair import BUNDLED, find_target
from hf_domino.pair import read_prompts as read_held_out

# A turn with its calls as JSON behind its words; tools are said first.
TURN = "{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|endoftext|>"
ROLES_IN_TURN = ("user", "assistant", "user", "assistant")
TOOLS = (
    "{% if tools %}<|mask|>tools{% for tool in tools %} {{ tool | tojson }}{% endfor %}<|endoftext|>{% endif %}"
    "{% for m in messages %}<|mask|>{{ m.role }}\n" + TURN + "{% endfor %}"
    "{% if add_generation_prompt %}<|mask|>assistant\n{% endif %}"
)
MARKED = f"{{% if m.role == 'assistant' %}}{{% generation %}}{TURN}{{% endgeneration %}}{{% else %}}{TURN}{{% endif %}}"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"zone": {"enum": ["utc", None]}}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
USER, ANSWER = {"role": "user", "content": "Rain in Oslo?"}, {"role": "assistant", "content": "Yes."}
SILENT, HUMAN = {**ANSWER, "content": None}, {"from": "human", "value": "a"}
CALLED = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "wet"}, ANSWER]
ASKED = f"<|mask|>tools {json.dumps(WEATHER)} {json.dumps(CLOCK)}<|endoftext|><|mask|>user\nRain in Oslo?<|endoftext|>"
READ = (
    f"{ASKED}<|mask|>assistant\n{json.dumps(CALL['function'])}<|endoftext|>"
    "<|mask|>tool\nwet<|endoftext|><|mask|>assistant\nYes.<|endoftext|>"
)
LEARNED = f"{json.dumps(CALL['function'])}<|endoftext|>Yes.<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer, whose template shows tools."""
    return chat_tokenizer(AutoTokenizer.from_pretrained(find_target(BUNDLED)), TOOLS)


@pytest.fixture
def rows_of(tmp_path):
    """A function that reads records as lines of a file, and returns what each row reads and learns."""

    def read(records, tokenizer):
        rows = load_rows(write_lines(tmp_path / "rows.jsonl", records), tokenizer)
        return [texts_of_row(row, tokenizer) for row in rows]

    return read


@pytest.mark.parametrize("template", [TOOLS, TOOLS.replace(TURN, MARKED)], ids=["by turns", "generation block"])
@pytest.mark.parametrize(
    "record",
    [
        {"messages": CALLED, "tools": [WEATHER, CLOCK]},
        {"messages": CALLED, "tools": json.dumps([WEATHER, CLOCK])},
        {"messages": [USER, CALLED[1] | {"content": None}, *CALLED[2:]], "tools": [WEATHER, CLOCK], "text": None},
        {"messages": [USER | {"tool_calls": None}, *CALLED[1:]], "tools": [WEATHER, CLOCK], "system": ""},
        {"prompt": CALLED[:1], "completion": CALLED[1:], "tools": [WEATHER, CLOCK]},
    ],
    ids=["a list", "JSON", "nulls", "empty fields", "a prompt"],
)
def test_tools_and_their_calls_are_read_and_learned(record, template, rows_of, tokenizer):
    assert rows_of([record], chat_tokenizer(tokenizer, template)) == [(READ, LEARNED)]


def test_lines_a_table_and_a_parquet_file_with_its_nulls_are_the_same_rows(rows_of, tokenizer, tmp_path):
    from datasets import Dataset

    other = {"name": "clock", "arguments": {"zone": "utc"}}
    records = [
        {"messages": CALLED, "tools": [WEATHER, CLOCK], "text": None},
        {"messages": [USER, {**ANSWER, "tool_calls": [{**CALL, "id": "a", "function": other}]}], "tools": [CLOCK]},
        {"messages": [USER, ANSWER]},
        {"text": "once upon a time"},
    ]
    table = Dataset.from_list(records)
    assert table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "zone": None}
    table.to_parquet(tmp_path / "rows.parquet")
    expected = rows_of(records, tokenizer)
    assert expected[0] == (READ, LEARNED)
    for source in (from_table(table, "table"), tmp_path / "rows.parquet"):
        assert [texts_of_row(row, tokenizer) for row in load_rows(source, tokenizer)] == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER, SILENT]}, r"messages\[1\]` must have `role` and `content`"),
        ({"messages": [USER, {**ANSWER, "content": [{"type": "text", "text": "Yes."}]}]}, "must be text"),
        ({"messages": [USER, "Yes."]}, r"messages\[1\]` must have .* got Yes"),
        ({"prompt": [USER], "completion": [SILENT]}, r"completion\[0\]` must have"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": None}]}, "must have .* got {'from': 'gpt'"),
        (
            {"conversations": [HUMAN, {"from": "observation", "value": "hm"}]},
            r"conversations\[1\]`: the speaker must be one of human, user, gpt, .* got 'observation'",
        ),
        ({"messages": [USER, {**ANSWER, "role": "gpt"}]}, "the speaker must be one of assistant, .*, got 'gpt'"),
        ({"messages": [{**USER, "role": "human"}, ANSWER]}, r"messages\[0\]`: the speaker must be .* got 'human'"),
        ({"messages": [USER, ANSWER], "tools": "a hammer"}, "`tools` must be a list of objects"),
        ({"messages": []}, "`messages` must be a list of messages"),
        ({"messages": [USER, {**ANSWER, "content": "cut \ud83d"}]}, "surrogates not allowed"),
        ({"text": "cut \ud83d"}, "surrogates not allowed"),
        ({"messages": [ANSWER]}, "must hold an assistant message that answers another"),
        ({"prompt": [USER], "completion": [USER]}, "must hold an assistant message that answers another"),
    ],
)
def test_what_is_no_answer_is_refused_by_name(record, message, rows_of, tokenizer):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{message}"):
        rows_of([{"text": "once upon a time"}, record], tokenizer)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({**USER, "from": "a forum"}, {**USER, "from": "a forum"}),
        ({**ANSWER, "tool_calls": [{**CALL, "id": "7"}]}, {**ANSWER, "tool_calls": [{**CALL, "id": "7"}]}),
        ({"from": "gpt", "value": "Yes."}, ANSWER),
        ({"from": "gpt", "value": "", "tool_calls": [CALL]}, {**ANSWER, "content": "", "tool_calls": [CALL]}),
        ({"from": "gpt", "value": "Yes.", "reasoning_content": "hm"}, {**ANSWER, "reasoning_content": "hm"}),
        ({"from": "tool", "value": "wet"}, {"role": "tool", "content": "wet"}),
    ],
)
def test_a_message_is_read_whole(message, read):
    assert read_messages({"messages": [USER, message]}, "messages") == [USER, read]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_null_that_somebody_wrote_is_learned(suffix, tokenizer, tmp_path):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "unit": None}}}
    record = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [{**WEATHER, "strict": None}]}
    path = write_lines(tmp_path / "rows.jsonl", [record])
    if suffix == "json":
        path = path.rename(tmp_path / "rows.json")
        path.write_text(json.dumps([record]))
    for source in (path, from_table([record], "a list")):
        (row,) = load_rows(source, tokenizer)
        read, learned = texts_of_row(row, tokenizer)
        assert learned == f"{json.dumps(call['function'])}<|endoftext|>"
        assert '"strict": null' in read


def test_a_slow_tokenizer_is_said(rows_of, tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ValueError, match=r"`messages` needs a fast tokenizer, .* save it as a fast tokenizer"):
        rows_of([{"messages": [USER, ANSWER]}], tokenizer)


# Asks for reasoning, here in brackets, where it is on, as templates of models that always reason do.
REASONS = TEMPLATE.replace("<mask>assistant: {%", "<mask>assistant: {{ '(' if thinking else '' }}{%")


@pytest.mark.parametrize(("thinking", "learned"), [(True, "hm) yes<eos>"), (False, "(hm) yes<eos>no<eos>")])
def test_turns_of_another_mode_are_left_out_and_counted(thinking, learned, tiny_tokenizer, caplog):
    short, long = ([USER | {"content": "so"}, {**ANSWER, "content": said}] for said in ("no", "(hm) yes"))
    tokenizer, source = chat_tokenizer(tiny_tokenizer, REASONS), from_table([{"messages": long + short}] * 2, "a")
    rows = load_rows(source, tokenizer, chat_template_kwargs={"thinking": thinking})
    assert [texts_of_row(row, tokenizer)[1] for row in rows] == [learned] * 2
    assert (rows.counts.records, rows.counts.rows, rows.counts.unaligned) == (2, 2, 2 * thinking)
    assert ("2 of 4 rows are left out, the first is a[0]: 2 assistant turns that do not" in caplog.text) == thinking
    assert ("--chat-template-kwargs" in caplog.text) == thinking


def test_the_target_reads_the_tools_of_a_prompt_and_its_rows_keep_them(tokenizer, tmp_path):
    records = [{"messages": [USER], "tools": json.dumps([WEATHER, CLOCK])}, {"messages": CALLED}]
    prompts, writer = write_lines(tmp_path / "prompts.jsonl", records), ScriptedWriter(tokenizer, lambda *_: "Wet.")
    settings = WritingSettings(min_distinct=0.0)
    report = write_data(writer, tokenizer, [EOS], tmp_path / "data", settings, [prompts], progress=False)
    assert report["prompts"]["dropped"] == {"tool calls": 1}
    (held_out,) = read_held_out(tmp_path / "data/train.jsonl")
    assert held_out["tools"] == [WEATHER, CLOCK]
    read = *writer.asked[0][0], encode(tokenizer, [held_out])["input_ids"][0]
    (checked,) = prepare_prompts(None, tokenizer, [held_out])
    assert {tokenizer.decode(ids) for ids in (*read, checked.input_ids[0])} == {f"{ASKED}<|mask|>assistant\n"}


@pytest.mark.parametrize("block", ["{}", "{{% generation %}}{}{{% endgeneration %}}"])
def test_what_a_template_writes_behind_the_end_token_is_not_learned(block, tiny_tokenizer):
    """As the line break behind `<|im_end|>`: the target has ended its answer before."""
    turn = "{{ m.content }}<eos> "
    turns = f"{{% if m.role == 'assistant' %}}{block.format(turn)}{{% else %}}{turn}{{% endif %}}"
    template = "{% for m in messages %}<mask>{{ m.role }}: " + turns + "{% endfor %}"
    template += "{% if add_generation_prompt %}<mask>assistant: {% endif %}"
    tokenizer = chat_tokenizer(tiny_tokenizer, template)
    messages = [{"role": role, "content": word} for role, word in zip(ROLES_IN_TURN, "abcd", strict=True)]
    (row,) = load_rows(from_table([{"messages": messages}], "list"), tokenizer)
    assert texts_of_row(row, tokenizer)[1] == "b<eos>d<eos>"
    without_end = chat_tokenizer(tiny_tokenizer, template.replace("<eos>", ""))
    (row,) = load_rows(from_table([{"messages": messages}], "list"), without_end)
    assert texts_of_row(row, without_end)[1] == "b d "  # there, the space is what ends an answer
