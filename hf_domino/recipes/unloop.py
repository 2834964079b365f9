"""Teach the bundled target not to loop, beside ordinary training on real text.

A small model that writes greedily falls into repetition, which flatters every way to speed it up: each repeat makes the
next more likely. In rounds, the target continues real text, and tokens that repeat an n-gram of its own are made less
likely (sequence-level unlikelihood training, Welleck et al., arXiv 1908.04319).

Shapes: B rows of a micro-batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass(frozen=True)
class UnloopRound:
    """Steps, peak learning rate and weight of the penalty in one round."""

    steps: int
    learning_rate: float
    penalty_weight: float


@dataclass(frozen=True)
class UnloopRecipe:
    """Sizes and schedule; lengths in tokens."""

    length: int = 192
    prompt_length: int = 64
    real_rows: int = 8  # per process and step
    own_rows: int = 12
    own_batches: int = 2  # written per process and round
    own_batch_size: int = 128
    ngram: int = 5
    rounds: tuple[UnloopRound, ...] = (UnloopRound(30, 4e-4, 1.0),) * 3
    seed: int = 1


def repeats(tokens: np.ndarray, n: int) -> np.ndarray:
    """Mark the tokens that complete an n-gram which stands earlier.

    Args:
        tokens (`np.ndarray`): Ids `[T]`.
        n (`int`): Length of an n-gram.

    Example:
    ```python
    >>> import numpy as np
    >>> from hf_domino.recipes.unloop import repeats
    >>> repeats(np.array([1, 2, 3, 1, 2, 3]), n=2).tolist()
    [False, False, False, False, True, True]

    ```
    """
    seen: set[tuple[int, ...]] = set()
    result = np.zeros(len(tokens), dtype=bool)
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end].tolist())
        result[end - 1] = gram in seen
        seen.add(gram)
    return result


class RealAndOwn(Dataset):
    """Real rows beside rows the target wrote: `real`, `own` and `marked`, `[T]` each; prompts are never marked."""

    def __init__(self, stream: np.ndarray, own: np.ndarray, recipe: UnloopRecipe, steps: int, seed: int):
        self.stream, self.own, self.recipe, self.steps, self.seed = stream, own, recipe, steps, seed
        self.marked = np.stack([repeats(row, recipe.ngram) for row in own])
        self.marked[:, : recipe.prompt_length] = False

    def __len__(self) -> int:
        return self.steps * self.recipe.own_rows * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = np.random.default_rng((self.seed, index)).integers(len(self.stream) - self.recipe.length)
        real = self.stream[start : start + self.recipe.length].astype(np.int64)
        row = index % len(self.own)
        return {"real": real, "own": self.own[row], "marked": self.marked[row]}


def repetition_penalty(logits: torch.Tensor, tokens: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Mean of -log(1 - p) over marked tokens, without rounding where p is nearly 1.

    Args:
        logits (`torch.Tensor`): `[B, T - 1, V]`, of tokens 1 to T - 1.
        tokens (`torch.Tensor`): Ids `[B, T]`.
        marked (`torch.Tensor`): `[B, T]` bool, tokens that repeat an n-gram.
    """
    others = logits.scatter(2, tokens[:, 1:, None], -torch.inf)
    penalty = logits.logsumexp(dim=-1) - others.logsumexp(dim=-1)
    return (penalty * marked[:, 1:]).sum() / marked[:, 1:].sum().clamp_min(1)


class UnloopTrainer(Trainer):
    """Adds the repetition penalty to the language-model loss.

    Args:
        real_rows (`int`): Real rows to use of each micro-batch.
        penalty_weight (`float`): Weight of the penalty beside the language-model loss.
        kwargs: As for [`~transformers.Trainer`].
    """

    def __init__(self, real_rows: int, penalty_weight: float, **kwargs):
        super().__init__(**kwargs)
        self.real_rows, self.penalty_weight = real_rows, penalty_weight
        self._last: dict[str, float] = {}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of one micro-batch of real and own rows."""
        real, own = inputs["real"][: self.real_rows], inputs["own"]
        logits = model(input_ids=torch.cat((real, own))).logits[:, :-1].float()
        likelihood = F.cross_entropy(logits[: len(real)].flatten(0, 1), real[:, 1:].flatten())
        penalty = repetition_penalty(logits[len(real) :], own, inputs["marked"])
        self._last = {"likelihood": round(likelihood.item(), 3), "penalty": round(penalty.item(), 3)}
        return likelihood + self.penalty_weight * penalty

    def log(self, logs, *args, **kwargs):
        """Log both terms of the last step beside the loss."""
        super().log(logs | (self._last if "loss" in logs else {}), *args, **kwargs)


@torch.no_grad()
def write_own(target: PreTrainedModel, stream: np.ndarray, recipe: UnloopRecipe, seed: int) -> np.ndarray:
    """Let the target continue pieces of real text greedily; prompts and continuations, `[rows, length]`."""
    generator = np.random.default_rng(seed)
    written = []
    for _ in tqdm(range(recipe.own_batches), "own text", disable=_rank() > 0):
        starts = generator.integers(len(stream) - recipe.prompt_length, size=recipe.own_batch_size)
        prompts = np.stack([stream[start : start + recipe.prompt_length] for start in starts]).astype(np.int64)
        with torch.autocast("cpu", torch.bfloat16):
            rows = target.generate(
                torch.from_numpy(prompts),
                attention_mask=torch.ones(prompts.shape, dtype=torch.long),
                min_new_tokens=recipe.length - recipe.prompt_length,
                max_new_tokens=recipe.length - recipe.prompt_length,
                do_sample=False,
            )
        written.append(rows.numpy())
    return np.concatenate(written)


def unloop(work: Path, recipe: UnloopRecipe) -> None:
    """Train `work/target` further and save it to `work/target-unlooped`.

    Args:
        work (`Path`): Work folder with `target/`, `tokenizer/` and `train.npy`.
        recipe (`UnloopRecipe`): Sizes and schedule.
    """
    stream = np.load(work / "train.npy", mmap_mode="r")
    source = work / "target"
    for number, schedule in enumerate(recipe.rounds, start=1):
        result = work / f"unloop/round-{number}"
        if not (result / "config.json").exists():
            _run_round(source, result, stream, recipe, schedule, seed=recipe.seed + number - 1)
        source = result
    if _rank() == 0:
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(work / "target-unlooped")
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / "target-unlooped")


def _run_round(
    source: Path, result: Path, stream: np.ndarray, recipe: UnloopRecipe, schedule: UnloopRound, seed: int
) -> None:
    set_seed(seed)
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    own = write_own(target, stream, recipe, seed=1000 * seed + _rank())
    data = RealAndOwn(stream, own, recipe, schedule.steps, seed)
    repeated = data.marked[:, recipe.prompt_length :].mean()
    print(f"{result.name}: {repeated:.3f} of its own tokens repeat an n-gram", flush=True)
    arguments = TrainingArguments(
        output_dir=str(result.parent),
        max_steps=schedule.steps,
        per_device_train_batch_size=recipe.own_rows,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=4,
        bf16=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    trainer = UnloopTrainer(recipe.real_rows, schedule.penalty_weight, model=target, args=arguments, train_dataset=data)
    trainer.train()
    if trainer.is_world_process_zero():
        target.save_pretrained(result)
    trainer.accelerator.wait_for_everyone()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    unloop(parser.parse_args().work, UnloopRecipe())
