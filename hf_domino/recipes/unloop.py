"""Teach the bundled target not to loop: sequence-level unlikelihood training on its own greedy text.

A small model that writes greedily falls into repetition, which flatters every way to speed it up. At each step the
model continues pieces of real text, and tokens that complete an n-gram it has already written are made less likely
(Welleck et al., arXiv 1908.04319), beside ordinary training on the real text.

Shapes: B rows of a micro-batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed


@dataclass(frozen=True)
class UnloopRecipe:
    """Sizes and schedule; lengths in tokens."""

    length: int = 192
    prompt_length: int = 64
    real_rows: int = 8  # per process and step
    own_rows: int = 16
    ngram: int = 5
    unlikelihood_weight: float = 1.0
    steps: int = 120
    learning_rate: float = 6e-4
    seed: int = 1


def repeated_ngrams(tokens: torch.Tensor, n: int) -> torch.Tensor:
    """Mark tokens that complete an n-gram which stands earlier in their row.

    Args:
        tokens (`torch.Tensor`): Ids `[B, T]`.
        n (`int`): Length of an n-gram.

    Returns:
        `torch.Tensor`: `[B, T]` bool; the first n - 1 of a row are never marked.
    """
    grams = tokens.unfold(1, n, 1)  # [B, T - n + 1, n]
    equal = (grams[:, :, None] == grams[:, None]).all(dim=-1)
    return F.pad(equal.tril(-1).any(dim=-1), (n - 1, 0))


class UnloopTrainer(Trainer):
    """Adds the unlikelihood of repeated n-grams to the language-model loss.

    Args:
        recipe (`UnloopRecipe`): Sizes and weights.
        kwargs: As for [`~transformers.Trainer`].
    """

    def __init__(self, recipe: UnloopRecipe, **kwargs):
        super().__init__(**kwargs)
        self.recipe = recipe

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of one micro-batch of real rows `[B, T]`, and of as many own rows as the recipe wants."""
        recipe, real = self.recipe, inputs["input_ids"]
        prompts = real.reshape(-1, recipe.prompt_length)[: recipe.own_rows]
        own = self._continue(prompts, recipe.length - recipe.prompt_length)
        logits = model(input_ids=torch.cat((real, own))).logits[:, :-1].float()
        likelihood = F.cross_entropy(logits[: len(real)].flatten(0, 1), real[:, 1:].flatten())
        marked = repeated_ngrams(own, recipe.ngram)
        marked[:, : recipe.prompt_length] = False
        probs = logits[len(real) :].softmax(dim=-1).gather(2, own[:, 1:, None])[..., 0]
        penalty = -torch.log1p(-probs.clamp(max=1 - 1e-4))[marked[:, 1:]].sum() / own.shape[0]
        self._repeated = marked.sum().item() / (own.shape[0] * (recipe.length - recipe.prompt_length))
        return likelihood + recipe.unlikelihood_weight * penalty / recipe.ngram

    def log(self, logs, *args, **kwargs):
        """Log the share of repeated tokens in the last step's own text beside the loss."""
        super().log(logs | ({"repeated": round(self._repeated, 3)} if "loss" in logs else {}), *args, **kwargs)

    def _continue(self, prompts: torch.Tensor, num_tokens: int) -> torch.Tensor:
        target = self.accelerator.unwrap_model(self.model)
        target.eval()
        own = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        target.train()
        return own


def unloop(work: Path, recipe: UnloopRecipe) -> None:
    """Train `work/target` further and save it to `work/target-unlooped`.

    Args:
        work (`Path`): Work folder with `target/` and `train.npy`.
        recipe (`UnloopRecipe`): Sizes and schedule.
    """
    set_seed(recipe.seed)
    target = AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.float32)
    stream = np.load(work / "train.npy", mmap_mode="r")
    starts = np.random.default_rng(recipe.seed).integers(len(stream) - recipe.length, size=40_000)
    rows = [{"input_ids": stream[start : start + recipe.length].astype(np.int64)} for start in starts]
    arguments = TrainingArguments(
        output_dir=str(work / "unloop-checkpoints"),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.real_rows,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=5,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        logging_steps=5,
        save_steps=20,
        save_total_limit=1,
        report_to="none",
        seed=recipe.seed,
    )
    trainer = UnloopTrainer(recipe, model=target, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=any((work / "unloop-checkpoints").glob("checkpoint-*")))
    if trainer.is_world_process_zero():
        target.save_pretrained(work / "target-unlooped")
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / "target-unlooped")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    unloop(parser.parse_args().work, UnloopRecipe())
