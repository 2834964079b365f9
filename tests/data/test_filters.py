"""Copies, near copies, loops and texts of an evaluation are found, wherever they stand, and nothing else is."""

from __future__ import annotations

import random
import string

import pytest

from hf_domino.data.filters import RUN, Exclusions, NearCopies, find_leaks, keep_apart, loops
from hf_domino.data.rows import RowDataset

QUESTION = "How do I sort a list of dictionaries by one of their keys in Python, and keep equal ones in order?"


def test_copies_differ_in_case_and_punctuation_alone():
    copies = NearCopies()
    assert [copies.add(text) for text in (QUESTION, "")] == [None, None]
    assert copies.add(QUESTION.upper().replace(",", " --") + "\n") == copies.add(" ?!") == "copy"


def test_near_copies_are_found_among_many_texts():
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=6)) for _ in range(200)]
    texts = [" ".join(generator.choices(words, k=60)) for _ in range(200)]
    copies = NearCopies()
    assert [text for text in [*texts, QUESTION] if copies.add(text)] == []
    assert {copies.find(text.replace(text.split()[15], "other", 1)) for text in texts} == {"near copy"}
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


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([*range(400)], False), ([*range(400), *([5, 6, 7] * 30)], True), ([3] * 20, True), ([3, 3], False)],
)
def test_a_loop_at_the_end_is_a_loop(ids, expected):
    assert loops(ids, 0.5) == expected
    assert not loops(ids, 0.0)


# --- evaluation text in training rows ---------------------------------------------------------------------------------


def rows_of(*ids, asked=0):
    return RowDataset([{"input_ids": list(row), "loss_mask": [0] * asked + [1] * (len(row) - asked)} for row in ids])


def leaks(train, evaluation, frame=(), asked=0):
    return find_leaks(rows_of(*train), rows_of(*evaluation, asked=asked), frame).tolist()


def test_leaks_are_those_of_the_definition(monkeypatch):
    monkeypatch.setattr("hf_domino.data.rows.ROWS_AT_ONCE", 7)
    draw = random.Random(0)
    evaluation, train = ([[draw.randrange(3) for _ in range(draw.randrange(2, 40))] for _ in range(n)] for n in (2, 60))
    for index in range(0, 60, 6):  # some hold a run of the evaluation: long enough, or just not
        length = RUN - index % 4 // 2
        start = draw.randrange(len(evaluation[1]) - length + 1)
        train[index] += evaluation[1][start : start + length]

    def runs(*rows):
        return {tuple(row[start : start + RUN]) for row in rows for start in range(len(row) - RUN + 1)}

    found = leaks(train, evaluation)
    assert found == [index for index, row in enumerate(train) if runs(row) & runs(*evaluation)]
    assert 0 < len(found) < 20


def test_what_evaluation_rows_have_in_common_is_not_their_text():
    frame = list(range(20))
    evaluation = [[*frame, 100 + index, *range(200 * index, 200 * index + 20)] for index in range(1, 4)]
    train = [*frame, 7, 8, 9], [5, *range(200, 220)], frame
    assert leaks(train, evaluation) == leaks(train, evaluation[:1], frame) == [1]
    assert leaks(train, evaluation[:2]) == leaks(train, evaluation[:1] * 5) == [0, 1, 2]  # copies are one row


@pytest.mark.parametrize("length", [5, 20])
def test_chats_that_begin_alike_behind_a_shared_system_prompt_are_different_texts(length):
    frame = list(range(length))
    evaluation = [[*frame, 100 + index, *range(200 * index, 200 * index + 40)] for index in range(1, 5)]
    train = [*frame, 101, *range(200, 211), *range(50, 90)], [*frame, 7, *range(201, 214), 8], [*frame, *range(50, 90)]
    assert leaks(train, evaluation, frame) == [1]


def test_a_phrase_of_many_training_rows_is_no_leak_unless_it_was_asked():
    question, phrase, own = (list(range(start, start + 20)) for start in (0, 100, 200))
    train = [[index, *phrase, index] for index in range(1000, 1010)]
    further = [7, *phrase], [8, *phrase, *own], [9, *question]
    for texts, found in (
        (train, list(range(10))),
        ([*train, *further], [11, 12]),
        ([question] * 30, list(range(30))),
        ([[question[-1], *phrase]] * 30, list(range(30))),  # across the border stands what was asked, too
    ):
        assert leaks(texts, [[*question, *phrase, *own]], asked=20) == found


def test_contaminated_rows_are_dropped_refused_or_kept():
    evaluation, clean = rows_of(range(30)), list(range(50, 80))
    train = rows_of(clean, range(5, 25), clean)
    left = keep_apart(train, evaluation)
    assert [row["input_ids"] for row in left] == [clean, clean]
    assert (left.counts.contaminated, left.counts.rows, left.counts.tokens) == (1, 2, 60)
    assert keep_apart(train, evaluation, "keep") is train
    assert keep_apart(rows_of(clean), evaluation).counts.contaminated == 0
    for rows, mode, said in (
        (train, "error", "training rows must be .*, got '1 of 3, the first is 2'.*set evaluation_leaks"),
        (rows_of(range(10, 30)), "drop", "'1 of 1, the first is 1'"),
        (train, "no", "evaluation_leaks must be one of drop, error, keep, got 'no'"),
    ):
        with pytest.raises(ValueError, match=said):
            keep_apart(rows, evaluation, mode)
