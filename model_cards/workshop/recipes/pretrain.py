"""Train the bundled target from nothing: a deep, narrow Qwen3 that writes Python.

Depth, not width, makes speculation pay: checking nine positions of a narrow model costs little more than one. The
model starts shallow, which trains faster, and grows: new layers begin as the identity (progressive stacking, Gong et
al., 2019; zero-initialised blocks, LLaMA Pro, arXiv 2401.02415).
Runs under `torchrun` with one process per core, which on CPUs is faster than threads inside one process.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_domino.training.muon import MuonWithAdamW


class Stage(NamedTuple):
    """Depth and schedule of one stage of the training."""

    num_hidden_layers: int
    steps: int
    micro_batches_per_step: int  # over all processes
    muon_lr: float
    adamw_lr: float
    decay_share: float  # share of the steps over which the learning rate falls to zero, at the end


class TargetRecipe(NamedTuple):
    """Sizes and schedule of the bundled target; lengths in tokens."""

    hidden_size: int = 256
    intermediate_size: int = 640
    vocab_size: int = 4096
    max_length: int = 512
    short_length: int = 256
    short_share: float = 0.75  # share of a stage's steps spent on short rows, which train a third faster
    micro_batch_tokens: int = 2048
    stages: tuple[Stage, ...] = (
        Stage(12, steps=1200, micro_batches_per_step=6, muon_lr=0.01, adamw_lr=3e-3, decay_share=0.5),
        Stage(18, steps=500, micro_batches_per_step=8, muon_lr=8e-3, adamw_lr=2e-3, decay_share=0.8),
    )
    seed: int = 0


class PackedRows(Dataset):
    """Micro-batches `[rows, length]` of one stage, cut from one stream: short rows first, full-length rows at the end.

    No stage sees the text of another.
    """

    def __init__(self, stream: np.ndarray, recipe: TargetRecipe, stage: int):
        before = sum(one.steps * one.micro_batches_per_step for one in recipe.stages[:stage])
        self.recipe, schedule, size = recipe, recipe.stages[stage], recipe.micro_batch_tokens
        self.stream, self.count = stream[before * size :], schedule.steps * schedule.micro_batches_per_step
        self.num_short = int(schedule.steps * recipe.short_share) * schedule.micro_batches_per_step
        if (needed := (before + self.count) * size) > len(stream):
            raise ValueError(
                f"the corpus must hold at least {needed} tokens for stage {stage}, got {len(stream)}: "
                "lower its `steps` or add packages."
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        size = self.recipe.micro_batch_tokens
        length = self.recipe.short_length if index < self.num_short else self.recipe.max_length
        piece = self.stream[index * size : (index + 1) * size].astype(np.int64)
        return torch.from_numpy(piece).view(-1, length)


def build_target(recipe: TargetRecipe, tokenizer) -> Qwen3ForCausalLM:
    """Create the untrained target."""
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.stages[0].num_hidden_layers,
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


def grow(model: Qwen3ForCausalLM, num_hidden_layers: int) -> Qwen3ForCausalLM:
    """A copy up to twice as deep that computes the same: evenly spread copies of layers whose outputs are zeroed."""
    old = model.config.num_hidden_layers
    if not old <= num_hidden_layers <= 2 * old:
        raise ValueError(f"num_hidden_layers must be from {old} to {2 * old}, got {num_hidden_layers}.")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_hidden_layers
    config.layer_types = None  # made anew for the new depth
    deeper = Qwen3ForCausalLM(Qwen3Config(**config.to_dict()))
    deeper.load_state_dict({n: t for n, t in model.state_dict().items() if ".layers." not in n}, strict=False)
    for index, layer in enumerate(deeper.model.layers):
        source = index * old // num_hidden_layers
        layer.load_state_dict(model.model.layers[source].state_dict())
        if index > 0 and (index - 1) * old // num_hidden_layers == source:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
    return deeper


def stage_folder(work: Path, recipe: TargetRecipe, stage: int) -> Path:
    """Where the model of a stage is saved; the last one's folder is `target`."""
    return work / ("target" if stage + 1 == len(recipe.stages) else f"target-stage-{stage}")


def pretrain(work: Path, recipe: TargetRecipe, stage: int) -> None:
    """Train one stage on the tokens in `work` and save model and tokenizer; resumes from a checkpoint."""
    set_seed(recipe.seed)
    torch._dynamo.config.automatic_dynamic_shapes = False  # two fixed shapes: compile each once
    torch._dynamo.config.optimize_ddp = False
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    if stage:
        before = stage_folder(work, recipe, stage - 1)
        model = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32)
    else:
        model = build_target(recipe, tokenizer)
    trainer = _stage_trainer(work, recipe, stage, grow(model, recipe.stages[stage].num_hidden_layers))
    trainer.train(resume_from_checkpoint=any(Path(str(trainer.args.output_dir)).glob("checkpoint-*")))
    if trainer.is_world_process_zero():
        result = stage_folder(work, recipe, stage)
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        model.config.use_cache = model.generation_config.use_cache = True  # the trainer switches it off
        model.save_pretrained(result)
        tokenizer.save_pretrained(result)


def _stage_trainer(work: Path, recipe: TargetRecipe, stage: int, model: Qwen3ForCausalLM) -> Trainer:
    schedule = recipe.stages[stage]
    held_out = np.load(work / "held_out.npy")[: 60 * recipe.max_length].astype(np.int64)
    arguments = TrainingArguments(
        output_dir=str(work / f"target-stage-{stage}-checkpoints"),
        max_steps=schedule.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=schedule.micro_batches_per_step // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=1,
        train_sampling_strategy="sequential",  # the stream is shuffled already; shapes stay equal on all ranks
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": int(schedule.steps * schedule.decay_share), "decay_type": "linear"},
        warmup_steps=schedule.steps // 50,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        torch_compile=True,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=250,
        save_steps=100,
        save_total_limit=2,
        report_to="none",
        seed=recipe.seed,
    )
    return Trainer(
        model=model,
        optimizers=(MuonWithAdamW(model, schedule.muon_lr, schedule.adamw_lr, weight_decay=0.05), None),
        args=arguments,
        train_dataset=PackedRows(np.load(work / "train.npy", mmap_mode="r"), recipe, stage),
        eval_dataset=list(torch.from_numpy(held_out).view(-1, 4, recipe.max_length)),
        data_collator=lambda items: {"input_ids": items[0], "labels": items[0]},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--stage", type=int, required=True)
    options = parser.parse_args()
    pretrain(options.work, TargetRecipe(), options.stage)
