"""Records of files of every kind: read one at a time, and errors that name the line."""

from __future__ import annotations

import json

import pytest

from hf_domino.data import records
from hf_domino.data.records import read_records, read_text


@pytest.fixture
def small_chunks(monkeypatch):
    """Files are read in pieces of seven characters, as large ones are in larger pieces."""
    monkeypatch.setattr(records, "CHUNK", 7)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_list(indent, tmp_path):
    written = [{"text": 'a [long] {text} \\ " ü ' * 9, "n": -1.5e3}, {}, {"text": "b", "x": [True, None, "]"]}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(written, indent=indent), encoding="utf-8")
    assert [record for _, record in read_records(path)] == written
    assert [place for place, _ in read_records(path)] == [f"{path}, item {number}" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"n": 1}\n{"n": 2}]', "line 3: must be a JSON list of objects, got Expecting ',' delimiter"),
        ('[\n{"n": 1}]\n]', "line 3: must be a JSON list of objects, got Extra data"),
        ('[\n{"n": 1},\n7]', "item 2: must be a JSON object, got int"),
    ],
)
def test_malformed_lists_are_named_by_line(text, message, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        list(read_records(path))
    assert message in str(error.value)


def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "rows.parquet"
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None]
    parquet.write_table(pyarrow.table({"messages": messages, "text": [None, "c"]}), path)
    assert list(read_records(path)) == [
        (f"{path}, row 1", {"messages": messages[0]}),
        (f"{path}, row 2", {"text": "c"}),
    ]
    path.write_text('{"text": "a"}')
    with pytest.raises(ValueError, match=r"rows\.parquet must be a parquet file"):
        list(read_records(path))


@pytest.mark.parametrize("text", ["one\ntwo three\n\n  four\n" * 9, "words without any line " * 9, "x" * 99, ""])
def test_pieces_of_a_text_are_the_text(text, tmp_path, small_chunks):
    path = tmp_path / "text.txt"
    path.write_text(text)
    pieces = list(read_text(path))
    assert "".join(pieces) == text
    assert all(len(piece) <= 21 for piece in pieces)
    assert len(pieces) > 9 or not text
