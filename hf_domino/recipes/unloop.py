"""Teach the bundled target not to loop, beside ordinary training on real text.

A small model that writes greedily falls into repetition, which flatters every way to speed it up: each repeat makes the
next more likely. In rounds, the target continues real text, and the probability of a token that repeats an n-gram is
pulled towards a fixed share of what it was at the last occurrence, so that loops die out: the penalty of DITTO (Xu et
al., arXiv 2206.02369) on the model's own text, as in unlikelihood training (Welleck et al., arXiv 1908.04319).

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
class UnloopRecipe:
    """Sizes and schedule; lengths in tokens."""

    length: int = 192
    prompt_length: int = 64
    real_rows: int = 8  # per process and step
    own_rows: int = 12
    own_batches: int = 3  # written per process and round
    own_batch_size: int = 128
    ngram: int = 5
    decay: float = 0.1  # probability of a repeated token over that at its last occurrence
    penalty_weight: float = 2.0
    rounds: int = 3
    steps_per_round: int = 40
    learning_rate: float = 4e-4
    seed: int = 1


def periods(tokens: np.ndarray, n: int) -> np.ndarray:
    """Distance of each token that completes a repeated n-gram to where that n-gram last ended; 0 for other tokens.

    Args:
        tokens (`np.ndarray`): Ids `[T]`.
        n (`int`): Length of an n-gram.

    Example:
    ```python
    >>> import numpy as np
    >>> from hf_domino.recipes.unloop import periods
    >>> periods(np.array([1, 2, 3, 1, 2, 3]), n=2).tolist()
    [0, 0, 0, 0, 3, 3]

    ```
    """
    last: dict[tuple[int, ...], int] = {}
    result = np.zeros(len(tokens), dtype=np.int64)
    for end in range(n - 1, len(tokens)):
        gram = tuple(tokens[end - n + 1 : end + 1].tolist())
        result[end] = end - last.get(gram, end)
        last[gram] = end
    return result


class RealAndOwn(Dataset):
    """Real rows beside rows the target wrote: `real`, `own` and `period`, `[T]` each; periods of prompts are 0."""

    def __init__(self, stream: np.ndarray, own: np.ndarray, recipe: UnloopRecipe, seed: int):
        self.stream, self.own, self.recipe, self.seed = stream, own, recipe, seed
        self.periods = np.stack([periods(row, recipe.ngram) for row in own])
        self.periods[:, : recipe.prompt_length] = 0

    def __len__(self) -> int:
        return self.recipe.steps_per_round * self.recipe.own_rows * int(os.environ.get("WORLD_SIZE", "1"))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = np.random.default_rng((self.seed, index)).integers(len(self.stream) - self.recipe.length)
        real = self.stream[start : start + self.recipe.length].astype(np.int64)
        row = index % len(self.own)
        return {"real": real, "own": self.own[row], "period": self.periods[row]}


def repetition_penalty(logits: torch.Tensor, tokens: torch.Tensor, period: torch.Tensor, decay: float) -> torch.Tensor:
    """Mean of -log(1 - |p - decay * p_before|) over repeated tokens, p_before taken as a constant.

    Args:
        logits (`torch.Tensor`): `[B, T - 1, V]`, of tokens 1 to T - 1.
        tokens (`torch.Tensor`): Ids `[B, T]`.
        period (`torch.Tensor`): `[B, T]`, as [`periods`] returns them.
        decay (`float`): In [0, 1].
    """
    probs = logits.softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
    period = period[:, 1:]
    before = torch.arange(probs.shape[1], device=probs.device) - period
    earlier = probs.detach().gather(1, before.clamp_min(0))
    counted = (period > 0) & (before >= 0)
    gap = (probs - decay * earlier).abs().clamp(max=1 - 1e-4)
    return (-torch.log1p(-gap) * counted).sum() / counted.sum().clamp_min(1)


class UnloopTrainer(Trainer):
    """Adds the repetition penalty to the language-model loss.

    Args:
        recipe (`UnloopRecipe`): Sizes and weights.
        kwargs: As for [`~transformers.Trainer`].
    """

    def __init__(self, recipe: UnloopRecipe, **kwargs):
        super().__init__(**kwargs)
        self.recipe = recipe
        self._last: dict[str, float] = {}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of one micro-batch of real and own rows."""
        real, own = inputs["real"][: self.recipe.real_rows], inputs["own"]
        logits = model(input_ids=torch.cat((real, own))).logits[:, :-1].float()
        likelihood = F.cross_entropy(logits[: len(real)].flatten(0, 1), real[:, 1:].flatten())
        penalty = repetition_penalty(logits[len(real) :], own, inputs["period"], self.recipe.decay)
        self._last = {"likelihood": round(likelihood.item(), 3), "penalty": round(penalty.item(), 3)}
        return likelihood + self.recipe.penalty_weight * penalty

    def log(self, logs, *args, **kwargs):
        """Log both terms of the last step beside the loss."""
        super().log(logs | (self._last if "loss" in logs else {}), *args, **kwargs)


@torch.no_grad()
def write_own(target: PreTrainedModel, stream: np.ndarray, recipe: UnloopRecipe, seed: int) -> np.ndarray:
    """Let the target continue pieces of real text greedily; prompts and continuations, `[rows, length]`."""
    generator = np.random.default_rng(seed)
    written = []
    for _ in tqdm(range(recipe.own_batches), "own text", disable=int(os.environ.get("RANK", "0")) > 0):
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
    rank = int(os.environ.get("RANK", "0"))
    target = AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.float32)
    stream = np.load(work / "train.npy", mmap_mode="r")
    for number in range(recipe.rounds):
        seed = recipe.seed + number
        set_seed(seed)
        own = write_own(target.eval(), stream, recipe, seed=1000 * seed + rank)
        repeated = np.mean([(periods(row, recipe.ngram)[recipe.prompt_length :] > 0).mean() for row in own])
        print(f"round {number + 1}: {repeated:.3f} of its own tokens repeat an n-gram", flush=True)
        arguments = TrainingArguments(
            output_dir=str(work / "unloop"),
            max_steps=recipe.steps_per_round,
            per_device_train_batch_size=recipe.own_rows,
            learning_rate=recipe.learning_rate,
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
        data = RealAndOwn(stream, own, recipe, seed)
        UnloopTrainer(recipe, model=target, args=arguments, train_dataset=data).train()
        if rank == 0:
            target.save_pretrained(work / f"unloop/round-{number + 1}")
    if rank == 0:
        target.save_pretrained(work / "target-unlooped")
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / "target-unlooped")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    unloop(parser.parse_args().work, UnloopRecipe())
