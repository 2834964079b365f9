"""Tiny targets of their own for training tests: the trainer freezes its target, and shared ones must not change."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer


@pytest.fixture
def target(tiny_qwen3):
    """A private copy of the tiny Qwen3 target that never stops early."""
    target = copy.deepcopy(tiny_qwen3)
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture
def greedy_rows(target):
    """Rows of different lengths: random prompts and what the target says to them, greedily."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for index in range(8):
        prompt = torch.randint(4, 64, (1, 4 + index), generator=generator)
        ids = target.generate(prompt, max_new_tokens=36, do_sample=False, pad_token_id=2)[0].tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt.shape[1] + [1] * (len(ids) - prompt.shape[1])})
    return rows


@pytest.fixture
def make_trainer(target, tmp_path: Path):
    """A function that builds a trainer with small, quiet arguments; keyword arguments override them."""

    def build(drafter, rows, eval_rows=None, **overrides) -> DominoTrainer:
        fields = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "num_anchors": 6,
            "learning_rate": 3e-3,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        arguments = DominoTrainingArguments(**(fields | overrides))
        return DominoTrainer(drafter, target, arguments, train_dataset=rows, eval_dataset=eval_rows)

    return build


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words `t4` to `t63`, separated by spaces; `end` (1) ends a text."""
    names = ["unknown", "end", "pad", "mask", *(f"t{index}" for index in range(4, 64))]
    words = Tokenizer(WordLevel({name: index for index, name in enumerate(names)}, unk_token="unknown"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end", pad_token="pad", unk_token="unknown")
