"""Answers to chats: every assistant turn is the target's, and rows are what it read and wrote."""

from __future__ import annotations

from functools import partial

import pytest
from chats import DROPS_REASONING, TEMPLATE, ScriptedWriter, chat_tokenizer, write_lines

from hf_domino.data.answers import write_answers
from hf_domino.data.prompts import read_prompts
from hf_domino.data.records import from_files
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import do_units

TWO_TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "given"},
    {"role": "user", "content": "two"},
]


@pytest.fixture
def answer(tiny_tokenizer, tmp_path):
    """A function that lets a scripted target answer records, and returns answers, tokenizer and writer."""

    def run(records, say, template=TEMPLATE, plain=False, **settings):
        tokenizer = chat_tokenizer(tiny_tokenizer, template)
        writer = ScriptedWriter(tokenizer, say)
        prompts = list(read_prompts(from_files([write_lines(tmp_path / "prompts.jsonl", records)]), plain))
        chosen = WritingSettings(**{"max_new_tokens": 16, "max_prompt_tokens": 16} | settings)
        do = partial(do_units, tmp_path / "units", (0, 1), False)
        return write_answers(prompts, writer, tokenizer, chosen, do), tokenizer, writer

    return run


def parts(row, tokenizer):
    """What of a row was read and what was written."""
    pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
    return tuple(tokenizer.decode([token for token, mask in pairs if mask == kind]) for kind in (0, 1))


@pytest.mark.parametrize("last", [[], [{"role": "assistant", "content": "last"}]], ids=["open", "answered"])
def test_every_assistant_turn_of_a_chat_is_written_anew(last, answer):
    (result,), tokenizer, writer = answer(
        [{"messages": TWO_TURNS + last}], lambda text, row, seed: "fine" if "two" in text else "well"
    )
    read, written = parts(result["rows"][0], tokenizer)
    assert written == "well<eos>fine<eos>"
    assert read == "<mask>user: one<eos><mask>assistant: <mask>user: two<eos><mask>assistant: "
    assert [m["content"] for m in result["messages"]] == ["one", "well", "two", "fine"]
    assert len(result["rows"]) == 1
    assert len({seed for _, _, seed in writer.asked}) == 2


def test_a_turn_that_is_shown_differently_later_is_a_row_of_its_own(answer):
    (result,), tokenizer, _ = answer([{"messages": TWO_TURNS}], lambda *_: "(hm) yes", DROPS_REASONING)
    assert [parts(row, tokenizer) for row in result["rows"]] == [
        ("<mask>user: one<eos><mask>assistant: ", "(hm) yes<eos>"),
        ("<mask>user: one<eos><mask>assistant:  yes<eos><mask>user: two<eos><mask>assistant: ", "(hm) yes<eos>"),
    ]


def test_a_greeting_and_a_system_turn_are_read_and_not_written(answer):
    messages = [{"role": "system", "content": "sys"}, {"role": "assistant", "content": "hello"}, *TWO_TURNS]
    (result,), tokenizer, _ = answer([{"messages": messages}], lambda *_: "ok")
    read, written = parts(result["rows"][0], tokenizer)
    assert read.startswith("<mask>system: sys<eos><mask>assistant: hello<eos><mask>user: one")
    assert written == "ok<eos>ok<eos>"


def test_prompts_and_completions(answer):
    records = [{"prompt": "one", "completion": "given"}, {"prompt": [{"role": "user", "content": "two"}]}]
    results, tokenizer, _ = answer(records, lambda *_: "ok")
    assert {parts(result["rows"][0], tokenizer)[0] for result in results} == {
        "<mask>user: one<eos><mask>assistant: ", "<mask>user: two<eos><mask>assistant: "
    }  # fmt: skip


def test_plain_text_is_continued_and_needs_no_template(answer):
    (result,), tokenizer, _ = answer([{"prompt": "once"}], lambda *_: " upon", template=None, plain=True)
    assert parts(result["rows"][0], tokenizer) == ("once", " upon<eos>")


@pytest.mark.parametrize(
    ("say", "settings", "flaw", "num_written"),
    [
        (lambda *_: "on~", {}, "unended", 1),
        (lambda *_: None, {}, "no round trip", 0),
        (lambda *_: "ok", {"max_length": 60}, "too long", 1),
        (lambda *_: "ok", {"max_length": 30}, "too long", 0),
    ],
    ids=["unended", "no ids", "second turn too long", "too long"],
)
def test_a_chat_ends_where_it_cannot_go_on(say, settings, flaw, num_written, answer):
    (result,), _, _ = answer([{"messages": TWO_TURNS}], say, **settings)
    assert result["flaw"] == flaw
    assert len(result["rows"]) == num_written


def test_batches_take_temperatures_in_turn_and_short_prompts_go_together(answer):
    records = [{"prompt": word} for word in ("eight", "one", "seven", "to", "a", "four")]
    results, _, writer = answer(records, lambda *_: "ok", temperatures=(0.0, 1.0), batch_size=2)
    assert [sampling.temperature for _, sampling, _ in writer.asked] == [0.0, 1.0, 0.0]
    assert [result["messages"][0]["content"] for result in results] == ["a", "to", "one", "four", "eight", "seven"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"txt": "hi"}, "line 1: needs `messages`, `conversations`, `prompt` or `text`, got `txt`"),
        ({"prompt": ""}, "line 1: field `prompt` must not be empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must hold a user's message"),
        ({"messages": [{"role": "user"}]}, "must have `role` and `content`"),
        ({"messages": [TWO_TURNS[0], {"role": "system", "content": "x"}]}, "the last message must be a user's"),
    ],
)
def test_other_records_are_refused(record, message, answer):
    with pytest.raises(ValueError, match=message):
        answer([record], lambda *_: "ok")
