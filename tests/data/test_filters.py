"""Loops and texts of an evaluation are found, wherever they stand, and nothing else is."""

from __future__ import annotations

import pytest

from hf_domino.data.filters import Exclusions, loops

QUESTION = "How do I sort a list of dictionaries by one of their keys in Python, and keep equal ones in order?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Please tell me: {QUESTION} Thanks!", True),  # holds it whole
        ("Sort a list of dictionaries by one of their keys in python -- and keep the order", True),  # 13 words in a row
        ("Sort a list of dictionaries by one of their keys in Python", False),
        ("how are YOU", True),
        ("How are you doing today?", False),  # a short text counts where it is all
    ],
)
def test_overlap_with_an_evaluation(text, expected):
    assert Exclusions([QUESTION, "How are you?"]).overlap(text) is expected


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([*range(400)], False), ([*range(400), *([5, 6, 7] * 30)], True), ([3] * 20, True), ([3, 3], False)],
)
def test_a_loop_at_the_end_is_a_loop(ids, expected):
    assert loops(ids, 0.5) == expected
    assert not loops(ids, 0.0)
