"""A trainer that is given the name of a target: it loads it, makes a drafter, and encodes records of every form."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM

from hf_domino import DominoDraftModel
from hf_domino.data import load_rows
from hf_domino.training import DominoTrainer, DominoTrainingArguments

CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def ghi"}]
FORMS = {
    "messages": {"messages": CHAT},
    "conversations": {"conversations": [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "def ghi"}]},
    "prompt and completion": {"prompt": "abc", "completion": "def"},
    "a prompt of messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "text": {"text": "abc def"},
    "token ids with a mask": {"input_ids": [4, 5, 6, 7], "loss_mask": [0, 1, 1, 1]},
    "token ids after a prompt": {"input_ids": [4, 5, 6, 7], "prompt_length": 1},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def name(saved_pair, tiny_tokenizer, tiny_qwen3, tmp_path, monkeypatch) -> str:
    """The folder of a target whose tokenizer has a chat template; the working directory is an empty one."""
    folder = tmp_path / "models" / "Tiny-1B"
    tiny_qwen3.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return str(folder)


def test_a_name_and_a_data_set_are_enough(name, tmp_path):
    trainer = DominoTrainer(name, train_dataset=Dataset.from_list([FORMS["messages"]] * 9))
    assert trainer.args.output_dir == "Tiny-1B-Domino"
    assert trainer.drafter.config.projector_type == "domino"
    assert trainer.drafter.config.draft_window_size == 256
    trainer.args.max_steps = 2
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    saved = DominoDraftModel.from_pretrained(tmp_path / "here" / "Tiny-1B-Domino")
    assert saved.config.target_name == "Tiny-1B"
    target = AutoModelForCausalLM.from_pretrained(name)
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=saved, **options), plain)


def test_a_drafter_is_made_as_the_command_makes_it(name, recipe, train, tmp_path):
    shape = ("num_hidden_layers", "block_size", "shift_label")
    fields = {key: value for key, value in recipe.items() if key not in shape} | {"target": name, "learning_rate": 0.0}
    assert train(fields | {"eval_file": None, "max_steps": 1}) == 0
    trainer = DominoTrainer(name, train_dataset=[FORMS["text"]], args=DominoTrainingArguments("x", use_cpu=True))
    expected = DominoDraftModel.from_pretrained(tmp_path / "run").state_dict()
    torch.testing.assert_close(trainer.drafter.state_dict(), expected, rtol=0, atol=0)


def test_names_of_both_and_a_drafter_alone(name, make_drafter, tiny_qwen3, tmp_path):
    drafter = make_drafter(tiny_qwen3)
    drafter.save_pretrained(tmp_path / "drafter")
    trainer = DominoTrainer(str(tmp_path / "drafter"), Path(name), train_dataset=[FORMS["text"]])
    assert torch.equal(trainer.drafter.fc.weight, drafter.fc.weight)
    with pytest.raises(ValueError, match="target must be given with a drafter, got None"):
        DominoTrainer(drafter, train_dataset=[FORMS["text"]])
    with pytest.raises(ValueError, match="target"):
        DominoTrainer(str(tmp_path / "nothing"), train_dataset=[FORMS["text"]])


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_alike_from_a_list_a_data_set_and_a_file(form, name, tmp_path):
    record = FORMS[form]
    path = tmp_path / "records.jsonl"
    path.write_text((json.dumps(record) + "\n") * 2)
    loaded = load_dataset("json", data_files=str(path), split="train")
    args = DominoTrainingArguments("x", use_cpu=True, max_steps=1)
    trainers = [
        DominoTrainer(name, args=args, train_dataset=records)
        for records in ([record] * 2, loaded, loaded.to_iterable_dataset())
    ]
    expected = list(load_rows(path, trainers[0].processing_class, vocab_size=64))
    assert sum(expected[0]["loss_mask"]) > 1
    for trainer in trainers:
        assert list(trainer.train_dataset) == expected


def test_several_processes_encode_the_same_examples(tiny_tokenizer, tmp_path, monkeypatch):
    def fork(*_, **__):
        raise AssertionError("a fork can wait for ever for a lock that a thread of this process holds")

    monkeypatch.setattr(os, "fork", fork)
    records = [{"text": "ab cd"[: 1 + index % 5] * 3} for index in range(11)]
    records[3] = {"input_ids": [5]}  # no anchor
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    copied = tmp_path / "copied.jsonl"
    copied.write_text(path.read_text() + "\n")
    alone, shared = load_rows(path, tiny_tokenizer), load_rows(copied, tiny_tokenizer, num_proc=2)
    assert list(shared) == list(alone)
    assert shared.counts.left_out == 1
    for field in ("records", "rows", "tokens", "copies", "without_anchor"):
        assert getattr(shared.counts, field) == getattr(alone.counts, field)
    assert shared.counts.first_left_out.endswith("line 4")
    monkeypatch.setattr(subprocess, "Popen", fork)  # what is in the cache is read without new processes
    assert list(load_rows(copied, tiny_tokenizer, num_proc=2)) == list(alone)


def test_what_a_process_does_not_encode_is_encoded_here(tiny_tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "abc"}\n' * 11)
    assert len(load_rows(path, tiny_tokenizer, num_proc=3)) == 11
    assert caplog.text.count("A process that encoded records ended with code 1") == 3
    path.write_text(path.read_text() + '{"text": 7}\n')
    with pytest.raises(ValueError, match=r"line 12: field `text` must be a string, got 7"):
        load_rows(path, tiny_tokenizer, num_proc=3)
