"""Chats as data sets have them: tools and calls, nulls that tables fill in, parts, modes, and what is no answer."""

from __future__ import annotations

import copy
import json

import pytest
from chats import DROPS_REASONING, GENERATION, TEMPLATE, TURNS, ScriptedWriter, chat_tokenizer, write_lines
from transformers import AutoTokenizer

from hf_domino.data.chat import read_messages, read_tools
from hf_domino.data.prompts import read_prompts
from hf_domino.data.records import from_files, from_table
from hf_domino.data.rows import load_rows
from hf_domino.data.settings import WritingSettings
from hf_domino.data.writing import write_data
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.check.prompts import prepare_prompts
from hf_domino.pair import BUNDLED, find_target
from hf_domino.pair import read_prompts as read_held_out

# A turn with its calls as JSON behind its words; tools are said first.
TURN = "{{ m.content }}{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}<|endoftext|>"
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
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
USER, ANSWER = {"role": "user", "content": "Rain in Oslo?"}, {"role": "assistant", "content": "Yes."}
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
    tokenizer = AutoTokenizer.from_pretrained(find_target(BUNDLED))
    tokenizer.chat_template = TOOLS
    return tokenizer


@pytest.fixture
def rows_of(tmp_path):
    """A function that reads records as lines of a file, and returns what each row reads and learns."""

    def read(records, tokenizer, **options):
        rows = load_rows(write_lines(tmp_path / "rows.jsonl", records), tokenizer, **options)
        return [texts(row, tokenizer) for row in rows]

    return read


def texts(row, tokenizer):
    learned = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    return tokenizer.decode(row["input_ids"]), tokenizer.decode(learned)


def variants():
    """One chat with tools in the shapes that data sets store it in."""
    chat = {"messages": CALLED, "tools": [WEATHER, CLOCK]}
    arguments = {"name": "weather", "arguments": json.dumps(CALL["function"]["arguments"])}
    as_text = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": arguments}]}
    flat = {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL["function"]])}
    turns = [("human", USER["content"]), ("function_call", json.dumps(CALL["function"])), ("observation", "wet")]
    turns = [{"from": who, "value": said} for who, said in [*turns, ("gpt", "Yes.")]]
    parts = [{**message, "content": [{"type": "text", "text": message.get("content", "")}]} for message in CALLED]
    return {
        "a list": chat,
        "JSON": {**chat, "tools": json.dumps(chat["tools"])},
        "nulls": {**chat, "tools": [{**WEATHER, "strict": None}, CLOCK]},
        "arguments as JSON": {**chat, "messages": [USER, as_text, *CALLED[2:]]},
        "calls as JSON": {**chat, "messages": [USER, flat, *CALLED[2:]]},
        "ShareGPT": {"conversations": turns, "tools": json.dumps(chat["tools"])},
        "parts": {**chat, "messages": parts},
        "a prompt": {"prompt": CALLED[:1], "completion": CALLED[1:], "tools": chat["tools"]},
    }


@pytest.mark.parametrize("template", [TOOLS, TOOLS.replace(TURN, MARKED)], ids=["by turns", "generation block"])
@pytest.mark.parametrize("shape", variants())
def test_tools_and_their_calls_are_read_and_learned(shape, template, rows_of, tokenizer):
    assert rows_of([variants()[shape]], chat_tokenizer(tokenizer, template)) == [(READ, LEARNED)]


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
        assert [texts(row, tokenizer) for row in load_rows(source, tokenizer)] == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            r"messages\[1\]` must have `role` and `content`",
        ),
        ({"messages": [USER, {**ANSWER, "content": None, "tool_calls": []}]}, r"messages\[1\]` must have `role` and"),
        ({"messages": [USER, {**ANSWER, "content": None, "tool_calls": "[]"}]}, r"messages\[1\]` must have `role` and"),
        ({"messages": [USER, {**ANSWER, "content": []}]}, "which must be text alone"),
        ({"messages": [USER, {**ANSWER, "content": 3}]}, "text alone .*got {'text': 3}"),
        (
            {"messages": [{**USER, "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, ANSWER]},
            "'image'",
        ),
        ({"messages": [{**USER, "content": None}, ANSWER]}, r"messages\[0\]` must have `role` and `content`"),
        ({"prompt": [USER], "completion": [{"role": "assistant", "content": None}]}, r"completion\[0\]` must have"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": None}]}, "must have `value`"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "hm"}]}, "got hm"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "a", "arguments": "b"}}]}]}, "an object"),
        ({"messages": [USER, ANSWER], "tools": "a hammer"}, "field `tools` must be a list of objects, .*got a hammer"),
        ({"messages": [USER, ANSWER], "tools": ["weather"]}, "field `tools` must be a list of objects"),
        ({"messages": []}, r"field `messages` must be a list of messages, got \[\]"),
        ({"messages": [ANSWER]}, "must hold an assistant message that answers another"),
        ({"conversations": [{"from": "gpt", "value": "Hi"}]}, "must hold an assistant message that answers another"),
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
        ({**ANSWER, "tool_calls": [CALL]}, {**ANSWER, "tool_calls": [CALL]}),
        ({**ANSWER, "tool_calls": [{**CALL, "id": "7"}]}, {**ANSWER, "tool_calls": [{**CALL, "id": "7"}]}),
        (
            {"role": "assistant", "content": "", "function_call": CALL["function"]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({"from": "gpt", "value": "Yes.", "tool_calls": [CALL]}, {**ANSWER, "tool_calls": [CALL]}),
        (
            {"from": "function_call", "value": '{"name": "clock"}'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": {}}}],
            },
        ),
    ],
    ids=[
        "from beside a role",
        "words beside a call",
        "the id of a call",
        "OpenAI's older name",
        "calls beside a value",
        "a call without arguments",
    ],
)
def test_a_message_is_read_whole(message, read):
    assert read_messages({"messages": [USER, message]}, "messages") == [USER, read]


def test_a_null_among_the_values_of_a_tool_is_one_of_them():
    schema = {"name": "weather", "parameters": {"properties": {"city": {"enum": ["Oslo", None]}}}}
    assert read_tools({"tools": [{**schema, "strict": None}]}) == {"tools": [schema]}


HIDDEN = TOOLS.replace(TURN, MARKED).replace("m.tool_calls", "[]")


@pytest.mark.parametrize("template", [TURNS + GENERATION, HIDDEN], ids=["by turns", "generation block"])
def test_a_template_that_knows_no_tool_calls_is_told(template, rows_of, tokenizer):
    with pytest.raises(ValueError, match=r"messages\[1\]`: the chat template does not show its `tool_calls`"):
        rows_of([{"messages": CALLED}], chat_tokenizer(tokenizer, template))


def test_a_slow_tokenizer_is_said(rows_of, tokenizer):
    slow = copy.copy(tokenizer)
    slow.__class__ = type("Slow", (type(tokenizer),), {"is_fast": False})
    with pytest.raises(ValueError, match=r"field `messages` needs a fast tokenizer, .*got Slow"):
        rows_of([{"messages": [USER, ANSWER]}], slow)


# Asks for reasoning, here in brackets, where it is on, as templates of models that always reason do.
REASONS = TEMPLATE.replace("<mask>assistant: {%", "<mask>assistant: {{ '(' if thinking else '' }}{%")


@pytest.mark.parametrize(("thinking", "learned"), [(True, "hm) yes<eos>"), (False, "(hm) yes<eos>no<eos>")])
def test_turns_of_another_mode_are_left_out_and_counted(thinking, learned, tiny_tokenizer, tmp_path, caplog):
    short, long = ([USER | {"content": "so"}, {**ANSWER, "content": said}] for said in ("no", "(hm) yes"))
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": long + short}, {"messages": short}])
    tokenizer = chat_tokenizer(tiny_tokenizer, REASONS)
    rows = load_rows(path, tokenizer, chat_template_kwargs={"thinking": thinking})
    assert texts(rows[0], tokenizer)[1] == learned
    assert (rows.counts.records, rows.counts.rows, rows.counts.untold) == (2, 1 if thinking else 2, 2 * thinking)
    if thinking:
        said = f"2 of 3 rows are left out, the first is {path}, line 1: 2 assistant turns that do not begin as"
        assert said in caplog.text
        assert "--chat-template-kwargs" in caplog.text
        with pytest.raises(ValueError, match=r"got none in 1 rows.*1 assistant turns that .*--chat-template-kwargs"):
            load_rows(from_table([{"messages": short}], "a"), tokenizer, chat_template_kwargs={"thinking": thinking})


def test_reasoning_that_is_dropped_later_is_learned_where_it_was_written(tiny_tokenizer, tmp_path):
    turns = [USER | {"content": "so"}, {**ANSWER, "content": "(hm) yes"}] * 2
    tokenizer = chat_tokenizer(tiny_tokenizer, DROPS_REASONING)
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", [{"messages": turns}]), tokenizer)
    assert [texts(row, tokenizer)[1] for row in rows] == ["(hm) yes<eos>"] * 2
    assert rows.counts.left_out == 0


@pytest.mark.parametrize("tools", [[WEATHER, CLOCK], json.dumps([WEATHER, CLOCK])], ids=["list", "JSON"])
def test_the_target_reads_the_tools_of_a_prompt_and_its_rows_keep_them(tools, tokenizer, tmp_path):
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"messages": [USER], "tools": tools}, {"messages": CALLED}])
    writer = ScriptedWriter(tokenizer, lambda *_: "Wet.")
    ends, settings = [tokenizer.eos_token_id], WritingSettings(min_distinct=0.0)
    report = write_data(writer, tokenizer, ends, tmp_path / "data", settings, [prompts], progress=False)
    assert report["prompts"]["dropped"] == {"tool calls": 1}
    asked = f"{ASKED}<|mask|>assistant\n"
    assert [tokenizer.decode(ids) for ids in writer.asked[0][0]] == [asked]
    (held_out,) = read_held_out(tmp_path / "data/train.jsonl")
    assert held_out["tools"] == [WEATHER, CLOCK]
    assert tokenizer.decode(encode(tokenizer, [held_out])["input_ids"][0]) == asked
    (checked,) = prepare_prompts(None, tokenizer, [held_out])
    assert tokenizer.decode(checked.input_ids[0]) == asked


def test_prompts_of_parts_are_compared_by_their_words(tmp_path):
    parts = [{"type": "text", "text": "Rain "}, {"type": "text", "text": "in Oslo?"}]
    path = write_lines(tmp_path / "prompts.jsonl", [{"messages": [{**USER, "content": parts}]}])
    (prompt,) = read_prompts(from_files([path]), plain=False)
    assert prompt.words == "Rain in Oslo?"
