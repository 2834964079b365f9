"""What a training reads: by name, in the mode it will be used in."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.transformers


@pytest.fixture
def write(tmp_path):
    def to_file(name, *records):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    return to_file


def test_an_evaluation_on_the_training_text_is_said(recipe, train, write, caplog, tmp_path):
    file = write("train.jsonl", {"input_ids": [5]}, *({"input_ids": [5, 6, token]} for token in range(7, 15)))
    assert train(recipe | {"train_file": file, "eval_file": file, "max_steps": 1, "walk_rows": 0}) == 0
    assert "the evaluation text is the training text" in caplog.text
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| train rows | 8 |" in card
    assert "| train rows left out | 1 |" in card


def test_data_sets_by_name_and_split(recipe, train, write, tmp_path):
    for split, count in (("train", 5), ("test", 4)):
        write(f"texts/{split}.jsonl", *({"text": f"{split} {index}"} for index in range(count)))
    texts = {"train_file": str(tmp_path / "texts"), "eval_file": str(tmp_path / "texts"), "eval_split": "test"}
    assert train(recipe | texts | {"max_train_rows": 3, "max_eval_rows": 2, "max_steps": 1}) == 0
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| train rows | 3 |" in card
    assert "| eval rows | 2 |" in card


def test_rows_beyond_what_the_target_reads_are_cut_and_said(recipe, train, write, caplog, tmp_path):
    long = " ".join(f"t{4 + index % 40}" for index in range(600))
    recipe |= {"train_file": write("train.jsonl", {"text": long}, {"text": long + " t5"}), "eval_file": None}
    assert train(recipe | {"max_steps": 1}) == 0
    assert "examples are cut at 256 tokens, because the target reads no more" in caplog.text
    assert "2 of 2 rows are cut at max_length" in caplog.text
    assert "| max_length | 256 |" in (tmp_path / "run/README.md").read_text()


@pytest.mark.parametrize("others", [3, 64])
def test_few_distinct_rows_are_said_before_training(others, recipe, train, write, caplog):
    texts = [{"input_ids": [5, 6, 4 + index % 8, 4 + index // 8]} for index in range(others)]
    recipe |= {"train_file": write("train.jsonl", *texts, texts[0]), "eval_file": None, "max_steps": 1}
    assert train(recipe) == 0
    assert ("there are only 3 distinct examples to train on" in caplog.text) == (others == 3)
