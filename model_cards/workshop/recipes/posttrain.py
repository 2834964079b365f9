"""Post-train the bundled target: sharper, and without loops.

A small model that writes greedily falls into repetition, which flatters every way to speed it up, and one that is only
punished for repeating becomes unsure of everything. So the target learns from its own best text: in rounds it continues
real text by sampling, continuations that do not repeat themselves are ranked by their likelihood, and the best are
trained on (rejection sampling as in RAFT, arXiv 2304.06767). Beside that, the tokens with which its greedy text enters
a loop are made less likely (sequence-level unlikelihood, arXiv 1908.04319).

Shapes: B rows of a micro-batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments, set_seed

from hf_domino.data.filters import distinct_ngram_ratio
from hf_domino.training.muon import MuonWithAdamW
from recipes.prompts import training_prompts


class PosttrainRound(NamedTuple):
    """Amounts of one round; batches are written and rows used per process."""

    steps: int
    temperature: float
    sampled_batches: int
    best_share: float  # of the continuations that do not loop, ranked by likelihood
    greedy_batches: int
    looping_rows: int  # of each micro-batch
    loop_weight: float


class PosttrainRecipe(NamedTuple):
    """Sizes and schedule; lengths in tokens."""

    rounds: tuple[PosttrainRound, ...] = (
        PosttrainRound(80, 0.6, sampled_batches=8, best_share=0.6, greedy_batches=1, looping_rows=4, loop_weight=0.2),
        PosttrainRound(70, 0.6, sampled_batches=6, best_share=0.6, greedy_batches=2, looping_rows=8, loop_weight=0.6),
        PosttrainRound(70, 0.45, sampled_batches=6, best_share=0.4, greedy_batches=1, looping_rows=6, loop_weight=0.3),
    )
    muon_lr: float = 2e-3
    adamw_lr: float = 5e-4
    prompt_length: int = 64
    new_tokens: int = 128
    batch_size: int = 160
    min_distinct: float = 0.65  # distinct-4-gram ratio of a continuation worth learning
    best_rows: int = 12  # of each micro-batch
    real_rows: int = 4
    loop_ngram: int = 8
    loop_onset: int = 24  # repeated tokens of a row that are made less likely
    seed: int = 1


def loop_onset(tokens: np.ndarray, n: int, most: int) -> np.ndarray:
    """Mark the first tokens that complete an n-gram which stands earlier."""
    seen: set[tuple[int, ...]] = set()
    result = np.zeros(len(tokens), dtype=bool)
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end].tolist())
        result[end - 1] = gram in seen and result.sum() < most
        seen.add(gram)
    return result


def best_rows(rows: np.ndarray, likelihoods: np.ndarray, recipe: PosttrainRecipe, share: float) -> np.ndarray:
    """The likeliest rows whose continuation does not repeat itself, `share` of these."""
    distinct = np.array([distinct_ngram_ratio(row[recipe.prompt_length :].tolist()) for row in rows])
    kept = np.flatnonzero(distinct >= recipe.min_distinct)
    if not len(kept):
        raise ValueError(f"all {len(rows)} continuations repeat themselves: lower min_distinct={recipe.min_distinct}.")
    ranked = kept[np.argsort(-likelihoods[kept], kind="stable")]
    return rows[ranked[: max(1, int(len(ranked) * share))]]


class OwnAndReal(Dataset):
    """Items `best`, `real` and `looping` with `onset`, `[T]` each, drawn at random."""

    def __init__(
        self, stream: np.ndarray, best: np.ndarray, looping: np.ndarray, recipe: PosttrainRecipe, steps: int, seed: int
    ):
        self.stream, self.best, self.looping, self.seed = stream, best, looping, seed
        self.length = recipe.prompt_length + recipe.new_tokens
        self.count = steps * recipe.best_rows * int(os.environ.get("WORLD_SIZE", "1"))
        self.onset = np.stack([loop_onset(row, recipe.loop_ngram, recipe.loop_onset) for row in looping])
        self.onset[:, : recipe.prompt_length] = False

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng((self.seed, index))
        start = generator.integers(len(self.stream) - self.length)
        looping = generator.integers(len(self.looping))
        return {
            "best": self.best[generator.integers(len(self.best))],
            "real": self.stream[start : start + self.length].astype(np.int64),
            "looping": self.looping[looping],
            "onset": self.onset[looping],
        }


def unlikelihood(logits: torch.Tensor, tokens: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Mean of -log(1 - p) over marked tokens `[B, T]`, without rounding where p is nearly 1.

    Logits are `[B, T - 1, V]`, of tokens 1 to T - 1.
    """
    others = logits.scatter(2, tokens[:, 1:, None], -torch.inf)
    penalty = logits.logsumexp(dim=-1) - others.logsumexp(dim=-1)
    return (penalty * marked[:, 1:]).sum() / marked[:, 1:].sum().clamp_min(1)


class PosttrainTrainer(Trainer):
    """Likelihood of the best and of real rows, and unlikelihood of the onset of loops."""

    def __init__(self, real_rows: int, schedule: PosttrainRound, **kwargs):
        super().__init__(**kwargs)
        self.real_rows, self.schedule = real_rows, schedule

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of one micro-batch."""
        best, real = inputs["best"], inputs["real"][: self.real_rows]
        looping, onset = (inputs[name][: self.schedule.looping_rows] for name in ("looping", "onset"))
        logits = model(input_ids=torch.cat((best, real, looping))).logits[:, :-1].float()
        likely, labels = logits[: -len(looping)], torch.cat((best, real))[:, 1:]
        loss = F.cross_entropy(likely.flatten(0, 1), labels.flatten())
        return loss + self.schedule.loop_weight * unlikelihood(logits[-len(looping) :], looping, onset)


@torch.no_grad()
def write_rows(
    target: PreTrainedModel, prompts: list[list[int]], recipe: PosttrainRecipe, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of equal length with their continuations `[rows, T]`, and the mean log-probability of each one."""
    rows, likelihoods = [], []
    writer = copy.deepcopy(target).bfloat16()  # as it is released, and half as slow
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for start in tqdm(range(0, len(prompts), recipe.batch_size), "own text", disable=_rank() > 0):
        ids = torch.tensor(prompts[start : start + recipe.batch_size])
        new_tokens = {"min_new_tokens": recipe.new_tokens, "max_new_tokens": recipe.new_tokens}
        mask = torch.ones_like(ids)
        written = writer.generate(ids, attention_mask=mask, use_cache=True, **new_tokens, **sampling)
        logits = writer(input_ids=written, logits_to_keep=recipe.new_tokens + 1).logits[:, :-1].float()
        new = written[:, recipe.prompt_length :, None]
        likelihoods.append(logits.log_softmax(dim=-1).gather(2, new)[..., 0].mean(dim=1).numpy())
        rows.append(written.numpy())
    return np.concatenate(rows), np.concatenate(likelihoods)


def posttrain(work: Path, recipe: PosttrainRecipe) -> None:
    """Train `work/target` further and save it to `work/target-posttrained`; finished rounds are not run again."""
    stream = np.load(work / "train.npy", mmap_mode="r")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    source = work / "target"
    for number, schedule in enumerate(recipe.rounds, start=1):
        result = work / ("target-posttrained" if number == len(recipe.rounds) else f"posttrain/round-{number}")
        if not (result / "config.json").exists():
            seed = recipe.seed + number - 1
            _run_round(source, result, stream, recipe, schedule, tokenizer.eos_token_id, seed)
            if _rank() == 0:
                tokenizer.save_pretrained(result)
        source = result


def _run_round(
    source: Path,
    result: Path,
    stream: np.ndarray,
    recipe: PosttrainRecipe,
    schedule: PosttrainRound,
    eos: int,
    seed: int,
) -> None:
    set_seed(1000 * seed + _rank())
    target = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    num_sampled = schedule.sampled_batches * recipe.batch_size
    num_prompts = num_sampled + schedule.greedy_batches * recipe.batch_size
    prompts = training_prompts(stream, num_prompts, (recipe.prompt_length,), eos, 1000 * seed + _rank())
    sampled, likelihoods = write_rows(target, prompts[:num_sampled], recipe, schedule.temperature)
    best = best_rows(sampled, likelihoods, recipe, schedule.best_share)
    looping, _ = write_rows(target, prompts[num_sampled:], recipe, temperature=0.0)
    distinct = np.mean([distinct_ngram_ratio(row[recipe.prompt_length :].tolist()) for row in looping])
    print(f"{result.name}: {len(best)} of {len(sampled)} rows kept, greedy distinct-4 {distinct:.3f}", flush=True)
    arguments = TrainingArguments(
        output_dir=str(result.parent / "posttrain"),
        max_steps=schedule.steps,
        per_device_train_batch_size=recipe.best_rows,
        lr_scheduler_type="linear",
        warmup_steps=4,
        bf16=True,
        use_cpu=True,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    trainer = PosttrainTrainer(
        recipe.real_rows,
        schedule,
        model=target,
        args=arguments,
        train_dataset=OwnAndReal(stream, best, looping, recipe, schedule.steps, seed=1000 * seed + _rank()),
        optimizers=(MuonWithAdamW(target, recipe.muon_lr, recipe.adamw_lr, weight_decay=0.0), None),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        target.config.use_cache = target.generation_config.use_cache = True  # the trainer switches it off
        target.save_pretrained(result)
    trainer.accelerator.wait_for_everyone()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    posttrain(parser.parse_args().work, PosttrainRecipe())
