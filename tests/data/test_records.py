"""Records of files, folders and data sets by name: read one at a time, and errors that name the line."""

from __future__ import annotations

import json

import pytest
from chats import write_lines

from hf_domino.data.records import from_dataset, read_records
from hf_domino.data.rows import load_rows

TEXTS = ["t4 t5", "t6 t7", "t8 t9"]


def ids(source, tokenizer, **kwargs):
    return [row["input_ids"] for row in load_rows(source, tokenizer, **kwargs)]


def test_a_json_file_holds_a_list_and_a_jsonl_file_lines(tmp_path):
    written = [{"text": 'a [long] {text} \\ " ü ' * 9, "n": -1.5e3}, {}, {"text": "b", "x": [True, None, "]"]}]
    path, lines = tmp_path / "rows.json", tmp_path / "rows.jsonl"
    path.write_text(json.dumps(written, indent=2), encoding="utf-8-sig")  # with a mark, as Windows writes it
    assert list(read_records(path)) == [(f"{path}, item {n}", record) for n, record in enumerate(written, start=1)]
    lines.write_text("".join(f"{json.dumps(record)}\n\n" for record in written), encoding="utf-8-sig")
    assert list(read_records(lines)) == [(f"{lines}, line {n}", r) for n, r in zip((1, 3, 5), written, strict=True)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.json", b'[\n{"n": 1}\n{"n": 2}]', " must be a JSON list of objects .*: .* line 3"),
        ("rows.json", b'{"n": 1}\n{"n": 2}', r" must be a JSON list of objects \(a file of lines is called .jsonl\)"),
        ("rows.json", b'[\n{"n": 1},\n7]', ", item 2: must be a JSON object, got int"),
        ("rows.json", b"7", ", item 1: must be a JSON object, got int"),
        ("rows.jsonl", b"{}\n\n{'n': 1}", ": line 3 must be a JSON object"),
        ("rows.jsonl", b"[1]", ", line 1: must be a JSON object, got list"),
        ("rows.parquet", b'{"text": "a"}', " must be a parquet file"),
        ("rows.json", b'[{}\n"caf\xe9"', ".*: 'utf-8' codec can't decode byte 0xe9"),
        ("rows.jsonl", b'{}\n"caf\xe9"', ": 'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_malformed_files_are_named_by_line(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(ValueError, match=f"{name}{message}"):
        list(read_records(path))


def test_several_files_are_read_as_one(tmp_path, word_tokenizer):
    files = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    files[0].write_text('{"text": "t4 t5"}\n')
    files[1].write_text('[{"text": "t6 t7"}, {"text": "t8 t9"}]')
    assert ids(files, word_tokenizer) == [[4, 5], [6, 7], [8, 9]]
    assert ids(files, word_tokenizer, max_rows=2) == [[4, 5], [6, 7]]
    with pytest.raises(FileNotFoundError, match="the training file must exist, got"):
        ids([*files, tmp_path / "none.jsonl"], word_tokenizer)
    with pytest.raises(ValueError, match=r"files of records must be files, got .*from_dataset"):
        ids(tmp_path, word_tokenizer)
    with pytest.raises(ValueError, match=r"files of records must be of .jsonl, .json, .parquet, got .*py"):
        ids([*files, __file__], word_tokenizer)


def test_a_folder_of_files(tmp_path, word_tokenizer):
    # As a data set on the Hub is one, with two splits of other columns.
    folder = str(tmp_path)
    write_lines(tmp_path / "train.jsonl", [{"text": text} for text in TEXTS])
    write_lines(tmp_path / "test.jsonl", [{"text": "t20 t21", "topic": [{"name": "t"}]}])
    assert ids(from_dataset(folder), word_tokenizer) == [[4, 5], [6, 7], [8, 9]]
    assert ids(from_dataset(folder, "test"), word_tokenizer) == [[20, 21]]
    with pytest.raises(ValueError, match=r"split of .* must be one of train, test, got 'eval'. Set train_split"):
        from_dataset(folder, "eval")


@pytest.mark.parametrize("with_splits", [False, True])
def test_what_save_to_disk_wrote(with_splits, tmp_path, word_tokenizer):
    from datasets import Dataset, DatasetDict

    # A column that is of no use, as images are, is not even looked at.
    saved = Dataset.from_list([{"text": text, "prompt": None, "image": [3]} for text in TEXTS] + [{"prompt": 3}])
    (DatasetDict({"train": saved, "test": saved.select([2])}) if with_splits else saved).save_to_disk(tmp_path)
    assert ids(from_dataset(str(tmp_path)), word_tokenizer, max_rows=2) == [[4, 5], [6, 7]]
    if with_splits:
        assert ids(from_dataset(str(tmp_path), "test"), word_tokenizer) == [[8, 9]]
    with pytest.raises(ValueError, match=r"\[3\]: field `prompt` must be a string, got 3"):
        ids(from_dataset(str(tmp_path)), word_tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
def test_other_files_are_read_by_datasets(streaming, tmp_path, word_tokenizer):
    """As a data set of the Hub is: by name, configuration and split, its files in whatever form."""
    for name, text in (("plain", "t4 t5"), ("long", "t6 t7")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.csv").write_text(f"text\n{text}\n{text} t8\n")
    assert ids(from_dataset(str(tmp_path / "long"), streaming=streaming), word_tokenizer) == [[6, 7], [6, 7, 8]]
    configurations = [{"config_name": name, "data_files": f"{name}/*.csv"} for name in ("plain", "long")]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configurations)}\n---\n")
    assert ids(from_dataset(f"{tmp_path}:plain", streaming=streaming), word_tokenizer) == [[4, 5], [4, 5, 8]]
    (tmp_path / "long" / "train.csv").write_bytes(b"text\n\xff\xfe\n")
    for name in ("long", "none"):
        with pytest.raises(ValueError, match="the data set must be a folder with a data set, or a name on the Hub"):
            ids(from_dataset(str(tmp_path / name), streaming=streaming), word_tokenizer)
