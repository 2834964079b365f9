"""Evaluation text is found in training rows, wherever it stands in them, and nothing else is."""

from __future__ import annotations

import random

import pytest

from hf_domino.data.leaks import NGRAM, LeakCheck, keep_apart
from hf_domino.data.rows import RowDataset
from hf_domino.data.tables import table_in_memory


def rows_of(*ids, as_table=False):
    rows = [{"input_ids": list(row), "loss_mask": [1] * len(row)} for row in ids]
    if not as_table:
        return RowDataset(rows)
    table = table_in_memory(rows)
    return RowDataset(table, RowDataset(rows).counts)


def found_by_definition(evaluation, train):
    def ngrams(row):
        return {tuple(row[start : start + NGRAM]) for start in range(len(row) - NGRAM + 1)}

    known = set().union(*(ngrams(row) for row in evaluation))
    return [index for index, row in enumerate(train) if ngrams(row) & known]


@pytest.mark.parametrize("as_table", [False, True])
def test_leaks_are_those_of_the_definition(as_table, monkeypatch):
    monkeypatch.setattr("hf_domino.data.rows.ROWS_AT_ONCE", 7)
    draw = random.Random(0)
    evaluation = [[draw.randrange(3) for _ in range(draw.randrange(2, 40))] for _ in range(2)]
    train = [[draw.randrange(3) for _ in range(draw.randrange(2, 40))] for _ in range(60)]
    for index in range(0, 60, 6):  # some hold a run of the evaluation: long enough, or just not
        length = NGRAM - index % 4 // 2
        start = draw.randrange(len(evaluation[1]) - length + 1)
        train[index] += evaluation[1][start : start + length]
    found = LeakCheck(rows_of(*evaluation)).find(rows_of(*train, as_table=as_table)).tolist()
    assert found == found_by_definition(evaluation, train)
    assert 0 < len(found) < 20


def test_what_evaluation_rows_have_in_common_is_not_their_text():
    frame = list(range(20))
    evaluation = [[*frame, 100 + index, *range(200 * index, 200 * index + 20)] for index in range(1, 4)]
    train = rows_of([*frame, 7, 8, 9], [5, *range(200, 220)], frame)
    assert LeakCheck(rows_of(*evaluation)).find(train).tolist() == [1]
    assert LeakCheck(rows_of(*evaluation[:2])).find(train).tolist() == [0, 1, 2]
    assert LeakCheck(rows_of(*evaluation[:1] * 5)).find(train).tolist() == [0, 1, 2]  # copies are one row
    assert LeakCheck(rows_of(*evaluation[:1]), frame).find(train).tolist() == [1]


def test_a_phrase_of_many_training_rows_is_no_leak_unless_it_was_asked():
    question, phrase, own = list(range(20)), list(range(100, 120)), list(range(200, 220))
    rows = [{"input_ids": [*question, *phrase, *own], "loss_mask": [0] * 20 + [1] * 40}]
    check = LeakCheck(RowDataset(rows))
    train = [[index, *phrase, index] for index in range(1000, 1010)]
    assert check.find(rows_of(*train)).tolist() == list(range(10))
    train += [[7, *phrase], [8, *phrase, *own], [9, *question]]
    assert check.find(rows_of(*train)).tolist() == [11, 12]
    assert check.find(rows_of(*[question] * 30)).tolist() == list(range(30))
    # Across the border stands what was asked, too.
    assert check.find(rows_of(*[[*question[-1:], *phrase]] * 30)).tolist() == list(range(30))


@pytest.mark.parametrize("length", [5, 20])
def test_chats_that_begin_alike_behind_a_shared_system_prompt_are_different_texts(length):
    frame = list(range(length))
    evaluation = [[*frame, 100 + index, *range(200 * index, 200 * index + 40)] for index in range(1, 5)]
    train = rows_of(
        [*frame, 101, *range(200, 211), *range(50, 90)], [*frame, 7, *range(201, 214), 8], [*frame, *range(50, 90)]
    )
    assert LeakCheck(rows_of(*evaluation), frame).find(train).tolist() == [1]


@pytest.mark.parametrize("as_table", [False, True])
def test_contaminated_rows_are_dropped_refused_or_kept(as_table):
    evaluation, clean = rows_of(range(30)), list(range(50, 80))
    train = rows_of(clean, range(5, 25), clean, as_table=as_table)
    left = keep_apart(train, evaluation)
    assert [row["input_ids"] for row in left] == [clean, clean]
    assert (left.counts.contaminated, left.counts.rows, left.counts.tokens) == (1, 2, 60)
    assert keep_apart(train, evaluation, "keep") is train
    assert keep_apart(rows_of(clean), evaluation).counts.contaminated == 0
    with pytest.raises(ValueError, match="that stand in evaluation rows, got '1 of 3, the first is 2'"):
        keep_apart(train, evaluation, "error")
    with pytest.raises(ValueError, match="'1 of 1, the first is 1'"):
        keep_apart(rows_of(range(10, 30)), evaluation)
    with pytest.raises(ValueError, match="evaluation_leaks must be one of drop, error, keep, got 'no'"):
        keep_apart(train, evaluation, "no")
