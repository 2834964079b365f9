"""Records of files, folders and data sets by name, with the place each stands at."""

from __future__ import annotations

import json

import pytest

from hf_domino.data.rows import load_rows
from hf_domino.data.sources import from_dataset, from_files

TEXTS = ["t4 t5", "t6 t7", "t8 t9"]


@pytest.fixture
def folder(tmp_path):
    """A folder as a data set on the Hub is one, with two splits; the target's settings lie beside one of them."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (folder / "train.jsonl.settings.json").write_text('{"seed": 0}')
    (folder / "test.jsonl").write_text('{"text": "t20 t21"}\n')
    return folder


def ids(source, tokenizer, **kwargs):
    return [row["input_ids"] for row in load_rows(source, tokenizer, **kwargs)]


def test_several_files_are_one_text(tmp_path, word_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "t4 t5"}\n')
    (tmp_path / "b.txt").write_text("t6 t7 t8 t9")
    files = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    assert ids(files, word_tokenizer, max_length=2) == [[4, 5], [6, 7], [8, 9]]
    assert ids(files[1], word_tokenizer, max_length=2, max_rows=1) == [[6, 7]]


def test_a_folder_of_files(folder, word_tokenizer):
    assert ids(from_dataset(str(folder)), word_tokenizer) == [[4, 5], [6, 7], [8, 9]]
    assert ids(from_dataset(str(folder), "test"), word_tokenizer) == [[20, 21]]
    with pytest.raises(ValueError, match=r"the split of .* must be one of train, test, got 'eval'"):
        from_dataset(str(folder), "eval")
    with (folder / "train.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 4: must be a JSON object"):
        load_rows(from_dataset(str(folder)), word_tokenizer)


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
        load_rows(from_dataset(str(tmp_path / "bad")), word_tokenizer)


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
        load_rows(from_dataset(str(tmp_path / "set" / "long"), streaming=streaming), word_tokenizer)


def test_what_is_no_data_set(tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder with a data set, .*got './none'"):
        from_dataset("./none")
    with pytest.raises(FileNotFoundError, match="no training file at"):
        from_files([tmp_path / "none.jsonl"])
