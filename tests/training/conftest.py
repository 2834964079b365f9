"""Rows and trainers for training tests."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer


@pytest.fixture(scope="session")
def written_rows(tiny_qwen3):
    """Rows of different lengths: random prompts and what the target says to them, greedily, without an end."""
    generator = torch.Generator().manual_seed(3)
    rows, options = [], {"max_new_tokens": 36, "do_sample": False, "eos_token_id": -1}
    for index in range(8):
        prompt = torch.randint(4, 64, (1, 4 + index), generator=generator)
        ids = tiny_qwen3.generate(prompt, **options)[0].tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt.shape[1] + [1] * (len(ids) - prompt.shape[1])})
    return rows


@pytest.fixture
def greedy_rows(written_rows):
    """A copy of these rows."""
    return copy.deepcopy(written_rows)


@pytest.fixture
def make_trainer(target, tmp_path: Path):
    """A function that builds a trainer with small, quiet arguments; keyword arguments override them."""

    def build(drafter, rows, eval_rows=None, target=target, **overrides) -> DominoTrainer:
        fields = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "num_anchors": 6,
            "learning_rate": 3e-3,
            "muon_learning_rate": None,
            "distillation_weight": 0.0,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        arguments = DominoTrainingArguments(**(fields | overrides))
        return DominoTrainer(drafter, target, arguments, train_dataset=rows, eval_dataset=eval_rows)

    return build
