"""Copies, near copies, loops and texts of an evaluation are found, and nothing else."""

from __future__ import annotations

import random
import string

import pytest

from hf_domino.data.filters import Exclusions, NearCopies, loops

QUESTION = "How do I sort a list of dictionaries by one of their keys in Python, and keep equal ones in order?"


def test_copies_differ_in_case_and_punctuation_alone():
    copies = NearCopies()
    assert copies.add(QUESTION) is None
    assert copies.add(QUESTION.upper().replace(",", " --") + "\n") == "copy"
    assert copies.add("") is None
    assert copies.add(" ?!") == "copy"


def test_near_copies_are_found_among_many_texts():
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=6)) for _ in range(200)]
    texts = [" ".join(generator.choices(words, k=60)) for _ in range(200)]
    copies = NearCopies()
    assert [text for text in texts if copies.add(text)] == []
    changed = [text.replace(text.split()[15], "other", 1) for text in texts]
    found = [copies.find(text) for text in changed]
    assert found.count("near copy") == 200
    assert copies.find(QUESTION) is None


def test_a_question_on_another_matter_is_no_near_copy():
    copies = NearCopies()
    copies.add(QUESTION)
    assert copies.find(QUESTION.replace("list of dictionaries", "table").replace("Python", "SQL")) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Please tell me: {QUESTION} Thanks!", True),  # holds it whole
        ("Sort a list of dictionaries by one of their keys in Python and keep the order", True),  # 13 words in a row
        ("Sort a list of dictionaries by their keys", False),
        ("How are you?", True),
        ("How are you doing today?", False),  # a short text counts where it is all
        ("what is the capital of France, please", True),
    ],
)
def test_overlap_with_an_evaluation(text, expected):
    exclusions = Exclusions([QUESTION, "How are you", "What is the capital of France?"])
    assert exclusions.overlap(text) is expected


def test_a_loop_at_the_end_is_a_loop():
    fine = list(range(400))
    assert not loops(fine, 0.5)
    assert loops([*fine, *([5, 6, 7] * 30)], 0.5)
    assert loops([3] * 20, 0.5)
    assert not loops([3] * 20, 0.0)
    assert not loops([3, 3], 0.5)
