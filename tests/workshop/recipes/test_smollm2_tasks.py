"""Tasks that come with a text: every phrase can be said, and `hf-domino data` reads what is written."""

from __future__ import annotations

import json
import random

import pytest
import yaml

from hf_domino.data.prompts import read_prompts
from hf_domino.data.records import from_files
from recipes.smollm2_tasks import (
    FOLLOWED_SHARE,
    PHRASES,
    PLACE,
    Tasks,
    read_functions,
    read_passages,
    write_tasks,
)

LISTS = yaml.safe_load(PHRASES.read_text())
ANSWER = "A ladder leans on the wall. " * 40


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "train.jsonl"
    turns = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}] for text in (ANSWER, "No.")]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


@pytest.fixture
def tasks(chats):
    return Tasks(LISTS, read_passages(chats), read_functions(), random.Random(0))


@pytest.mark.parametrize("name", LISTS)
def test_every_phrase_can_be_said(name, tasks):
    assert all(isinstance(phrase, str) for phrase in LISTS[name])
    for _ in range(50):
        said = tasks.say(name)
        assert said
        assert not any(place in said for place in (f"{{{other}}}" for other in LISTS))


def test_every_list_is_used():
    used = {name for phrases in LISTS.values() for phrase in phrases for name in PLACE.findall(phrase)}
    assert set(LISTS) - used == {"task", "follow_up"}


def test_passages_are_whole_sentences_of_some_length(chats):
    (passage,) = read_passages(chats)  # the other answer is too short
    assert passage.endswith("the wall.")
    assert ANSWER.startswith(passage)
    assert 150 <= len(passage) <= 350


def test_functions_are_whole():
    functions = read_functions()
    assert len(functions) > 100
    for code in functions[:50]:
        compile(code, "function", "exec")


def test_tasks_are_prompts_that_the_target_answers_turn_by_turn(chats, tmp_path):
    path = write_tasks(chats, tmp_path / "tasks.jsonl", 200, seed=0)
    prompts = list(read_prompts(from_files([path]), plain=False))
    followed = [prompt for prompt in prompts if len(prompt.messages) == 3]
    assert abs(len(followed) / 200 - FOLLOWED_SHARE) < 0.1
    assert {tuple(prompt.answers) for prompt in followed} == {(1, 3)}
    assert len({prompt.words for prompt in prompts}) > 150  # of one passage
    written = path.read_text()
    assert write_tasks(chats, path, 3, seed=0).read_text() == written  # kept
    assert write_tasks(chats, tmp_path / "again.jsonl", 200, seed=0).read_text() == written
    assert write_tasks(chats, tmp_path / "others.jsonl", 200, seed=1).read_text() != written
