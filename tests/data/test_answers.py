"""Answers to chats: every assistant turn is the target's, and rows are what it read and wrote."""

from __future__ import annotations

from functools import partial

import pytest
from chats import DROPS_REASONING, TEMPLATE, ScriptedWriter, chat_tokenizer, texts_of_row, write_lines

from hf_domino.data.answers import write_answers
from hf_domino.data.prompts import prompt_of
from hf_domino.data.records import read_records
from hf_domino.data.settings import WritingSettings
from hf_domino.data.units import run_units

TWO_TURNS = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "given"},
    {"role": "user", "content": "two"},
]


@pytest.fixture
def answer(tiny_tokenizer, tmp_path):
    """A function that lets a scripted target answer records, and returns answers, tokenizer and writer."""

    def run(records, say, template=TEMPLATE, base=tiny_tokenizer, **settings):
        tokenizer = chat_tokenizer(base, template)
        writer = ScriptedWriter(tokenizer, say)
        placed = read_records(write_lines(tmp_path / "prompts.jsonl", records))
        prompts = [prompt_of(record, place) for place, record in placed]
        chosen = WritingSettings(**{"max_new_tokens": 16, "max_prompt_tokens": 16} | settings)
        do = partial(run_units, tmp_path / "units", (0, 1), False)
        return write_answers(prompts, writer, tokenizer, chosen, do), tokenizer, writer

    return run


GREETING = [{"role": "system", "content": "sys"}, {"role": "assistant", "content": "hello"}]
ASKED, AGAIN = "<mask>user: one<eos><mask>assistant: ", "<mask>user: two<eos><mask>assistant: "
BOTH = (f"{ASKED}well<eos>{AGAIN}fine<eos>", "well<eos>fine<eos>")


@pytest.mark.parametrize(
    ("record", "template", "rows"),
    [
        ({"messages": TWO_TURNS}, TEMPLATE, [BOTH]),
        ({"messages": [*TWO_TURNS, {"role": "assistant", "content": "last"}]}, TEMPLATE, [BOTH]),
        (
            {"messages": GREETING + TWO_TURNS},
            TEMPLATE,
            [(f"<mask>system: sys<eos><mask>assistant: hello<eos>{BOTH[0]}", BOTH[1])],
        ),
        ({"prompt": "one", "completion": "given"}, TEMPLATE, [(f"{ASKED}well<eos>", "well<eos>")]),
        (
            {"prompt": "one", "system_prompt": "sys", "labels": [1]},
            TEMPLATE,
            [(f"<mask>system: sys<eos>{ASKED}well<eos>", "well<eos>")],
        ),
        (
            {"prompt": "one", "chat_template_kwargs": {"mood": "(calm)"}},
            "{{ mood }}" + TEMPLATE,
            [(f"(calm){ASKED}well<eos>", "well<eos>")],
        ),
        ({"prompt": TWO_TURNS[2:]}, TEMPLATE, [(f"{AGAIN}fine<eos>", "fine<eos>")]),
        ({"text": "one"}, None, [("onewell<eos>", "well<eos>")]),
        (  # a turn that is shown differently once others follow is a row of its own
            {"messages": TWO_TURNS},
            DROPS_REASONING,
            [(f"{ASKED}(hm)well<eos>", "(hm)well<eos>"), (f"{ASKED}well<eos>{AGAIN}(hm)fine<eos>", "(hm)fine<eos>")],
        ),
    ],
    ids=[
        "open", "answered", "greeted", "a prompt", "a system turn", "its kwargs", "a prompt of messages", "plain text",
        "dropped reasoning",
    ],
)  # fmt: skip
def test_every_assistant_turn_is_the_targets(record, template, rows, answer):
    reason = "(hm)" * (template == DROPS_REASONING)
    (result,), tokenizer, writer = answer(
        [record], lambda text, row, seed: reason + ("fine" if "two" in text else "well"), template
    )
    assert [texts_of_row(row, tokenizer) for row in result["rows"]] == rows
    said = "".join(message["content"] for message in result["messages"] if message["role"] == "assistant")
    assert said.removeprefix("hello") == "".join(learned for _, learned in rows).replace("<eos>", "")
    assert len({seed for _, _, seed in writer.asked}) == len(writer.asked)


# Reasoning between markers that are special tokens, as Gemma 4 and gpt-oss have them.
MARKERS = ["<think>", "</think>"]
STRIPS = TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
REFUSES = "{% for m in messages if '<think>' in m.content %}{{ raise_exception('no markers in content') }}{% endfor %}"
SPLITS = TEMPLATE.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<mask>assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": "<eos>", "content": "text"},
    },
}


@pytest.fixture
def marking_tokenizer(tiny_tokenizer):
    """A tokenizer whose markers of reasoning are special tokens."""
    tokenizer = chat_tokenizer(tiny_tokenizer)
    tokenizer.add_tokens(MARKERS, special_tokens=True)
    return tokenizer


def say_with_reasoning(text, row, seed):
    return "<think>hm</think>" + ("fine" if "two" in text else "well")


@pytest.mark.parametrize(
    ("template", "response_template", "words"),
    [
        (STRIPS, None, {"content": "<think>hm</think>well"}),
        (REFUSES + STRIPS, RESPONSE_TEMPLATE, {"content": "well", "reasoning_content": "hm"}),
    ],
)
def test_reasoning_between_special_tokens_is_no_answer_once_others_follow(
    template, response_template, words, answer, marking_tokenizer
):
    marking_tokenizer.response_template = response_template
    (result,), tokenizer, _ = answer([{"messages": TWO_TURNS}], say_with_reasoning, template, marking_tokenizer)
    assert [texts_of_row(row, tokenizer)[0] for row in result["rows"]] == [
        f"{ASKED}<think>hm</think>well<eos>",
        f"{ASKED}well<eos>{AGAIN}<think>hm</think>fine<eos>",
    ]
    assert result["messages"][1] == {"role": "assistant", **words}
    assert result["flaw"] is None


def test_a_reply_that_is_parsed_goes_back_as_it_was_written(answer, marking_tokenizer):
    marking_tokenizer.response_template = RESPONSE_TEMPLATE
    (result,), tokenizer, _ = answer([{"messages": TWO_TURNS}], say_with_reasoning, SPLITS, marking_tokenizer)
    (row,) = result["rows"]
    assert texts_of_row(row, tokenizer)[1] == "<think>hm</think>well<eos><think>hm</think>fine<eos>"


@pytest.mark.parametrize("said", ["<think>hm", "<think>hm~"])
def test_a_reply_that_cannot_be_parsed_is_kept_as_its_words(said, answer, marking_tokenizer):
    fields = {name: {**field, "optional": False} for name, field in RESPONSE_TEMPLATE["fields"].items()}
    marking_tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": fields}
    (result,), _, _ = answer([{"prompt": "one"}], lambda *_: said, TEMPLATE, marking_tokenizer)
    assert result["messages"][-1] == {"role": "assistant", "content": "<think>hm"}


def test_a_chat_ends_where_the_template_refuses_what_the_target_wrote(answer, marking_tokenizer):
    (result,), _, _ = answer([{"messages": TWO_TURNS}], say_with_reasoning, REFUSES + TEMPLATE, marking_tokenizer)
    assert result["flaw"] == "refused by the chat template"
    assert result["refusal"] == "prompt 1: field `messages`: the chat template rejects it: no markers in content"


def test_a_prompt_that_the_template_refuses_stops_the_run(answer, marking_tokenizer):
    with pytest.raises(ValueError, match=r"prompt 1: .* the chat template rejects it: no markers"):
        answer([{"prompt": "<think>"}], say_with_reasoning, REFUSES + TEMPLATE, marking_tokenizer)


@pytest.mark.parametrize(
    ("said", "max_length", "flaw", "num_written"),
    [
        ("on~", 4096, "unended", 1),
        ("ok", 60, "too long", 1),
        ("ok", 30, "too long", 0),
    ],
)
def test_a_chat_ends_where_it_cannot_go_on(said, max_length, flaw, num_written, answer):
    (result,), _, _ = answer([{"messages": TWO_TURNS}], lambda *_: said, max_length=max_length)
    assert (result["flaw"], len(result["rows"])) == (flaw, num_written)


def test_batches_take_temperatures_in_turn_and_short_prompts_go_together(answer):
    records = [{"prompt": word} for word in ("eight", "one", "seven", "to", "a", "four")]
    results, _, writer = answer(records, lambda *_: "ok", temperatures=(0.0, 1.0), batch_size=2)
    assert [sampling.temperature for _, sampling, _ in writer.asked] == [0.0, 1.0, 0.0]
    assert [result["messages"][0]["content"] for result in results] == ["a", "to", "one", "four", "eight", "seven"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"txt": "hi"}, "needs `messages`, .* got `txt`"),
        ({"prompt": ""}, "`prompt` must not be empty"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must hold a user's message"),
        ({"messages": [TWO_TURNS[0], {"role": "system", "content": "x"}]}, "last message .* Cut the chat"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            r"messages\[0\]`: the speaker must be one of .* got 'human'",
        ),
        ({"text": "a", "system": "sys"}, "`system` changes what the target reads, and is not read in a text"),
        ({"prompt": "a", "images": ["a.png"]}, "`images` changes what the target reads, .* leave such records out"),
    ],
)
def test_other_records_are_refused(record, message, answer):
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        answer([record], lambda *_: "ok")
