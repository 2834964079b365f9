"""Train the bundled target from nothing: a deep, narrow Qwen3 that writes Python.

Depth, not width, makes speculation pay: checking nine positions of a narrow model costs little more than one.
Runs under `torchrun` with one process per core, which on CPUs is faster than threads inside one process.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed

from hf_domino.training.muon import MuonWithAdamW


@dataclass(frozen=True)
class TargetRecipe:
    """Sizes and schedule of the bundled target; lengths in tokens."""

    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 12
    vocab_size: int = 4096
    max_length: int = 512
    short_length: int = 256
    short_share: float = 0.75  # share of the steps spent on short rows, which train a third faster
    micro_batch_tokens: int = 2048
    micro_batches_per_step: int = 6  # over all processes
    steps: int = 1200
    muon_lr: float = 0.01
    adamw_lr: float = 3e-3
    seed: int = 0


class PackedRows(Dataset):
    """Micro-batches cut from one stream of tokens: short rows first, full-length rows at the end.

    Each item is a whole micro-batch of shape `(rows, length)`.
    """

    def __init__(self, stream: np.ndarray, recipe: TargetRecipe):
        self.stream, self.recipe = stream, recipe
        self.num_items = recipe.steps * recipe.micro_batches_per_step
        self.num_short = int(recipe.steps * recipe.short_share) * recipe.micro_batches_per_step
        if self.num_items * recipe.micro_batch_tokens > len(stream):
            raise ValueError(
                f"the corpus must hold at least {self.num_items * recipe.micro_batch_tokens} tokens for "
                f"steps={recipe.steps}, got {len(stream)}: lower `steps` or add packages."
            )

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.recipe.micro_batch_tokens
        length = self.recipe.short_length if index < self.num_short else self.recipe.max_length
        piece = self.stream[index * size : (index + 1) * size].astype(np.int64)
        return torch.from_numpy(piece).view(-1, length)


class _PretrainingTrainer(Trainer):
    def _get_train_sampler(self, *args, **kwargs) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # the stream is shuffled already; shapes stay equal on all ranks


def build_target(recipe: TargetRecipe, tokenizer) -> Qwen3ForCausalLM:
    """Create the untrained target."""
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.hidden_size // 64,
        num_key_value_heads=recipe.hidden_size // 128,
        head_dim=64,
        max_position_embeddings=recipe.max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def pretrain(work: Path, recipe: TargetRecipe) -> None:
    """Train on `work/train.npy` and save the model and tokenizer to `work/target`; resumes from a checkpoint.

    Args:
        work (`Path`): Folder with `tokenizer/`, `train.npy` and `held_out.npy` (token streams, uint16).
        recipe (`TargetRecipe`): Sizes and schedule.
    """
    set_seed(recipe.seed)
    torch._dynamo.config.automatic_dynamic_shapes = False  # two fixed shapes: compile each once
    torch._dynamo.config.optimize_ddp = False
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    train = PackedRows(np.load(work / "train.npy", mmap_mode="r"), recipe)
    held_out = np.load(work / "held_out.npy")[: 60 * recipe.max_length].astype(np.int64)
    arguments = TrainingArguments(
        output_dir=str(work / "target-checkpoints"),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=recipe.micro_batches_per_step // _num_processes(),
        per_device_eval_batch_size=1,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": recipe.steps // 2, "decay_type": "linear"},
        warmup_steps=recipe.steps // 50,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        torch_compile=True,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=500,
        save_steps=200,
        save_total_limit=2,
        report_to="none",
        seed=recipe.seed,
    )
    model = build_target(recipe, tokenizer)
    trainer = _PretrainingTrainer(
        model=model,
        optimizers=(MuonWithAdamW(model, recipe.muon_lr, recipe.adamw_lr, weight_decay=0.05), None),
        args=arguments,
        train_dataset=train,
        eval_dataset=list(torch.from_numpy(held_out).view(-1, 4, recipe.max_length)),
        data_collator=lambda items: {"input_ids": items[0], "labels": items[0]},
    )
    has_checkpoint = any((work / "target-checkpoints").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=has_checkpoint)
    if trainer.is_world_process_zero():
        trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False).save_pretrained(work / "target")
        tokenizer.save_pretrained(work / "target")


def _num_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=TargetRecipe.steps)
    options = parser.parse_args()
    pretrain(options.work, TargetRecipe(steps=options.steps))
