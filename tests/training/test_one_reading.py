"""One record, one reading: a trainer in Python reads a list, a data set and a stream as a file of the same records."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset

from hf_domino.data.rows import RowDataset, load_rows
from hf_domino.training.hidden_states.folder import CachedRows
from hf_domino.training.hidden_states.writing import StateWriter

LONG = list(range(4, 34))
RECORDS = {
    "padding under attention_mask": {
        "input_ids": [0, 0, *range(4, 16), 0], "loss_mask": [1] * 15, "attention_mask": [0, 0, *[1] * 12, 0]
    },
    "labels beside loss_mask": {
        "input_ids": list(range(4, 12)), "loss_mask": [1] * 8, "labels": [-100] * 4 + [8, 9, 10, 11]
    },
    "assistant_masks beside loss_mask": {
        "input_ids": list(range(4, 12)), "loss_mask": [0, *[1] * 7], "assistant_masks": [1] * 6 + [0, 0]
    },
    "longer than max_length": {"input_ids": LONG, "loss_mask": [1] * len(LONG)},
}  # fmt: skip
MALFORMED = {
    "a mask of another length": ({"input_ids": [4, 5, 6], "loss_mask": [1, 1]}, r"`loss_mask` must be 3 numbers"),
    "an id beyond the vocabulary": ({"input_ids": [4, 64], "loss_mask": [1, 1]}, r"token ids must be in \[0, 63\]"),
}
MAX_LENGTH = 20


class MapStyle(torch.utils.data.Dataset):
    """A data set of torch, of tensors, whose end is not an IndexError."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        return {name: torch.tensor(values) for name, values in self.records[index].items()}


class Stream(torch.utils.data.IterableDataset):
    """A stream of torch."""

    def __init__(self, records):
        self.records = records

    def __iter__(self):
        return iter(self.records)


ENTRIES = {
    "list": list,
    "list of arrays": lambda records: [dict(Dataset.from_list([one]).with_format("np")[0]) for one in records],
    "torch data set": MapStyle,
    "torch stream": Stream,
    "Dataset": Dataset.from_list,
    "Dataset in torch format": lambda records: Dataset.from_list(records).with_format("torch"),
    "stream": lambda records: Dataset.from_list(records).to_iterable_dataset(),
    "RowDataset": RowDataset,
}


@pytest.fixture
def from_file(tmp_path):
    """A function that reads records from a file, as `hf-domino train` does."""

    def read(records):
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return list(load_rows(path, max_length=MAX_LENGTH, vocab_size=64))

    return read


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_read_alike_wherever_it_comes_from(name, entry, from_file, target, make_drafter, make_trainer):
    records = [RECORDS[name]] * 2
    expected = from_file(records)
    rows = ENTRIES[entry](records)
    trainer = make_trainer(make_drafter(target), rows, rows, max_length=MAX_LENGTH)
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        assert list(dataset) == expected


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_record_is_named_wherever_it_comes_from(name, entry, target, make_drafter, make_trainer):
    record, message = MALFORMED[name]
    good = {"input_ids": [4, 5, 6], "loss_mask": [1, 1, 1]}
    with pytest.raises(ValueError, match=rf"\[1\]: .*{message}"):
        list(make_trainer(make_drafter(target), ENTRIES[entry]([good, record])).train_dataset)


def test_a_stream_of_text_is_tokenized(target, make_drafter, word_tokenizer, tmp_path, caplog):
    from hf_domino.training.arguments import DominoTrainingArguments
    from hf_domino.training.trainer import DominoTrainer

    rows = Dataset.from_list([{"text": "t4 t5 t6"}, {"text": "t7"}, {"text": "t8 " * 30}]).to_iterable_dataset()
    args = DominoTrainingArguments(str(tmp_path), max_steps=3, use_cpu=True, report_to="none", max_length=MAX_LENGTH)
    trainer = DominoTrainer(make_drafter(target), target, args, train_dataset=rows, processing_class=word_tokenizer)
    assert [row["input_ids"] for row in trainer.train_dataset] == [[4, 5, 6], [8] * MAX_LENGTH]
    assert trainer.train().global_step == 3
    assert caplog.text.count("1 of 3 rows are left out, the first is train_dataset[1]") == 1


def test_a_stream_without_anything_to_learn_is_an_error(target, make_drafter, make_trainer):
    rows = Dataset.from_list([{"input_ids": [4, 5], "loss_mask": [0, 1]}]).to_iterable_dataset()
    with pytest.raises(ValueError, match="train_dataset: rows must hold at least one with two neighbouring tokens"):
        make_trainer(make_drafter(target), rows).train()


def test_stored_states_are_cut_with_their_examples(target, make_drafter, make_trainer, tmp_path, caplog):
    drafter = make_drafter(target)
    record = RECORDS["longer than max_length"]
    StateWriter(target, drafter.config, tmp_path / "states", dtype="float32").write([record], progress=False)
    whole = CachedRows([record], tmp_path / "states", target, drafter.config)
    trainer = make_trainer(drafter, whole, max_length=MAX_LENGTH)
    row = trainer.train_dataset[0]
    assert row["input_ids"] == LONG[:MAX_LENGTH]
    torch.testing.assert_close(row["hidden_states"], whole[0]["hidden_states"][:MAX_LENGTH], rtol=0, atol=0)
    assert "train_dataset: 1 of 1 rows are cut at max_length." in caplog.text
    assert len(whole[0]["input_ids"]) == len(LONG)
    trainer.train()


def test_what_is_evaluated_by_hand_is_read_as_well(target, make_drafter, make_trainer):
    padded, plain = RECORDS["padding under attention_mask"], list(range(4, 16))
    trainer = make_trainer(make_drafter(target), [padded])
    found = trainer.evaluate([padded])
    expected = trainer.evaluate({"plain": [{"input_ids": plain, "loss_mask": [1] * 12}]})
    assert found["eval_loss"] == expected["eval_plain_loss"]
