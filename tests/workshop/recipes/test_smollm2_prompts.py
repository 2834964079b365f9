"""The prompts that a drafter of SmolLM2 is measured on: what they are, and that commands read them."""

from collections import Counter
from pathlib import Path

import pytest
from chats import chat_tokenizer

import recipes
from hf_domino.data.filters import RUN, Exclusions, NearCopies, words_of
from hf_domino.data.prompts import texts_of
from hf_domino.data.records import from_files
from hf_domino.evaluation.benchmark.prompts import encode, read_batches
from hf_domino.pair.smollm2 import SHORT_PROMPTS

KINDS = ("chat", "code", "arithmetic", "extraction", "rewriting", "lists", "json", "translation")
FOLDER = Path(recipes.__file__).parent
SHORT, LONG = SHORT_PROMPTS, FOLDER / "smollm2_long_prompts.jsonl"
LONG_CHARACTERS = range(3000, 6000)  # 1,350 to 1,650 tokens of SmolLM2, chat template included; code takes more


def read(path):
    (prompts,) = read_batches(path, 1000, 1000)
    return prompts


def text_of(prompt):
    return "\n".join(message["content"] for message in prompt["messages"])


def runs_of(text):
    words = words_of(text)
    return {" ".join(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


def test_kinds_have_as_many_prompts_each_and_take_turns():
    short, long = read(SHORT), read(LONG)
    assert Counter(prompt["kind"] for prompt in short) == dict.fromkeys(KINDS, 12)
    assert Counter(prompt["kind"] for prompt in short if len(prompt["messages"]) == 3) == dict.fromkeys(KINDS, 3)
    assert [prompt["kind"] for prompt in short] == [*KINDS] * 12  # the first N of them are of every kind
    assert len(long) == 20
    assert {prompt["kind"] for prompt in long} == set(KINDS)


@pytest.mark.parametrize("path", [SHORT, LONG], ids=["short", "long"])
def test_a_prompt_is_a_chat_that_ends_with_a_user(path):
    for prompt in read(path):
        assert set(prompt) == {"kind", "messages"}
        assert [message["role"] for message in prompt["messages"]] in (["user"], ["user", "assistant", "user"])
        assert all(set(message) == {"role", "content"} for message in prompt["messages"])
        assert all(message["content"] == message["content"].strip() != "" for message in prompt["messages"])


def test_lengths():
    assert all(10 <= len(text_of(prompt).split()) <= 120 for prompt in read(SHORT))
    assert all(len(text_of(prompt)) in LONG_CHARACTERS for prompt in read(LONG))


def test_no_prompt_is_like_another():
    seen, copies = set(), NearCopies()
    for text in map(text_of, [*read(SHORT), *read(LONG)]):
        runs = runs_of(text)
        assert seen.isdisjoint(runs)
        assert copies.add(text) is None
        seen |= runs


@pytest.mark.parametrize("path", [SHORT, LONG], ids=["short", "long"])
def test_they_can_be_kept_out_of_training_text(path):
    exclusions = Exclusions(texts_of(from_files([path])))
    assert all(exclusions.overlap(message["content"]) for message in read(path)[0]["messages"])
    assert not exclusions.overlap("a chat about something else")


def test_conversations_are_encoded_whole(tiny_tokenizer):
    chat = chat_tokenizer(tiny_tokenizer)
    prompts = read(SHORT)[8:16]
    rows = encode(chat, prompts)["input_ids"]
    assert len(rows) == len(prompts)
    for row in rows.tolist():
        assert row.count(chat.mask_token_id) == 4  # three turns, and the one to be written
