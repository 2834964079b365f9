"""Records of files, folders and data sets by name: read one at a time, and errors that name the line."""

from __future__ import annotations

import json

import pytest

from hf_domino.data import records
from hf_domino.data.records import from_dataset, from_files, read_records, read_text
from hf_domino.data.rows import load_rows

TEXTS = ["t4 t5", "t6 t7", "t8 t9"]


def ids(source, tokenizer, **kwargs):
    return [row["input_ids"] for row in load_rows(source, tokenizer, **kwargs)]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_holds_a_list_or_lines(indent, tmp_path):
    written = [{"text": 'a [long] {text} \\ " ü ' * 9, "n": -1.5e3}, {}, {"text": "b", "x": [True, None, "]"]}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(written, indent=indent), encoding="utf-8")
    assert list(read_records(path)) == [(f"{path}, item {n}", record) for n, record in enumerate(written, start=1)]
    path.write_text("".join(f"{json.dumps(record)}\n\n" for record in written))
    assert list(read_records(path)) == [(f"{path}, line {n}", r) for n, r in zip((1, 3, 5), written, strict=True)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.json", b'[\n{"n": 1}\n{"n": 2}]', "line 3: must be a JSON list of objects, got Expecting ',' delimiter"),
        ("rows.json", b'[\n{"n": 1}]\n]', "line 3: must be a JSON list of objects, got Extra data"),
        ("rows.json", b'[\n{"n": 1},\n7]', "item 2: must be a JSON object, got int"),
        ("rows.jsonl", b"{\"n\": 1}\n\n{'n': 1}", "line 3: must be a JSON object, got Expecting property name"),
        ("rows.jsonl", b"[1]", "line 1: must be a JSON object, got list"),
        ("rows.parquet", b'{"text": "a"}', "rows.parquet must be a parquet file"),
        *((f"rows.{kind}", b'[{}\n"caf\xe9"', "line 2: must be UTF-8, got byte 0xe9") for kind in ("json", "jsonl")),
    ],
)
def test_malformed_files_are_named_by_line(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(text if "UTF" not in message or name != "rows.jsonl" else text.replace(b"[", b""))
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


@pytest.mark.parametrize(
    "text", ["one\ntwo three\n\n  four\n" * 9, "words without any line " * 9, "a\r\nb\r\n" * 9, ""]
)
def test_pieces_of_a_text_are_the_text(text, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "CHUNK", 7)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    pieces = list(read_text(path))
    assert "".join(pieces) == text.replace("\r\n", "\n")
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert len(pieces) > 4 or "\n" not in text


def test_several_files_are_one_text(tmp_path, word_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "t4 t5"}\n')
    (tmp_path / "b.txt").write_text("t6 t7\nt8 t9 t10")  # whose last piece holds no anchor
    files = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    assert ids(files, word_tokenizer, max_length=2) == [[4, 5], [6, 7], [8, 9]]
    assert ids(files, word_tokenizer, max_length=2, max_rows=2) == [[4, 5], [6, 7]]
    (tmp_path / "b.txt").write_bytes(b"t4\ncaf\xe9")
    with pytest.raises(ValueError, match=r"b\.txt, line 2: must be UTF-8, got byte 0xe9"):
        ids(files, word_tokenizer)


def test_a_folder_of_files(tmp_path, word_tokenizer):
    # As a data set on the Hub is one, with two splits; the target's settings lie beside one of them.
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "train.jsonl.settings.json").write_text('{"seed": 0}')
    (folder / "test.jsonl").write_text('{"text": "t20 t21"}\n')
    assert ids(from_dataset(str(folder)), word_tokenizer) == [[4, 5], [6, 7], [8, 9]]
    assert ids(from_dataset(str(folder), "test"), word_tokenizer) == [[20, 21]]
    with pytest.raises(ValueError, match=r"the split of .* must be one of train, test, got 'eval'"):
        from_dataset(str(folder), "eval")
    with (folder / "train.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 4: must be a JSON object"):
        ids(from_dataset(str(folder)), word_tokenizer)


@pytest.mark.parametrize("with_splits", [False, True])
def test_what_save_to_disk_wrote(with_splits, tmp_path, word_tokenizer):
    from datasets import Dataset, DatasetDict

    # A column that is of no use, as images are, is not even looked at.
    saved = Dataset.from_list([{"text": text, "image": [3]} for text in TEXTS])
    (DatasetDict({"train": saved, "test": saved.select([2])}) if with_splits else saved).save_to_disk(tmp_path / "it")
    assert ids(from_dataset(str(tmp_path / "it")), word_tokenizer, max_rows=2) == [[4, 5], [6, 7]]
    if with_splits:
        assert ids(from_dataset(str(tmp_path / "it"), "test"), word_tokenizer) == [[8, 9]]
    Dataset.from_list([{"text": "t4 t5", "prompt": None}, {"text": None, "prompt": 3}]).save_to_disk(tmp_path / "bad")
    with pytest.raises(ValueError, match=r"bad\[1\]: field `prompt` must be a string, got 3"):
        ids(from_dataset(str(tmp_path / "bad")), word_tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
def test_other_files_are_read_by_datasets(streaming, tmp_path, word_tokenizer):
    """As a data set of the Hub is: by name, configuration and split, its files in whatever form."""
    for name, text in (("plain", "t4 t5"), ("long", "t6 t7")):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "train.csv").write_text(f"text\n{text}\n{text} t8\n")
    source = from_dataset(str(tmp_path / "set" / "long"), streaming=streaming)
    assert ids(source, word_tokenizer) == [[6, 7], [6, 7, 8]]
    configurations = ({"config_name": name, "data_files": f"{name}/*.csv"} for name in ("plain", "long"))
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs: {json.dumps(list(configurations))}\n---\n")
    named = from_dataset(f"{tmp_path / 'set'}:plain", streaming=streaming)
    assert ids(named, word_tokenizer) == [[4, 5], [4, 5, 8]]
    (tmp_path / "set" / "long" / "train.csv").write_bytes(b"text\n\xff\xfe\n")
    with pytest.raises(ValueError, match="the data set must be a folder with a data set, or a name on the Hub"):
        ids(from_dataset(str(tmp_path / "set" / "long"), streaming=streaming), word_tokenizer)


def test_what_is_no_data_set(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with a data set, .*got './none'"):
        from_dataset("./none")
    with pytest.raises(FileNotFoundError, match="no training file at"):
        from_files([tmp_path / "none.jsonl"])
