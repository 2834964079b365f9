"""Make the bundled pair from nothing: corpus, tokenizer, target, on-policy text, drafter and its DFlash baseline.

Every stage leaves its result in the work folder and is skipped if that is there, so the command can be interrupted and
called again. A target that is in the output folder already is kept, and drafters are made for it. The seed is fixed;
the committed target was made with 3 processes for its first stage and 4 for the others, the drafters with 2.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_domino.methods import DominoDraftModel
from hf_domino.pair import BUNDLED
from hf_domino.targets.identity import identify
from recipes.cards import RECIPE as DRAFTER
from recipes.cards import write_cards
from recipes.continuing import continue_prompts, settings_file
from recipes.corpus import REQUIREMENTS, Module, collect_modules, train_tokenizer
from recipes.pretrain import TargetRecipe, stage_folder
from recipes.processes import HF_DOMINO, kind_flags, torchrun
from recipes.prompts import held_out_prompts, training_prompts

MAX_SHARD_SIZE = "12MB"
WEIGHTS = "model.safetensors"
TOKENIZER_MODULES = 2500
REPETITION_PENALTY = 1.04  # part of the target: a small model that writes greedily would loop without it
NUM_EVALUATION_ROWS = 64
Stage = tuple[str, Path, Callable[[], None]]  # its name, what it leaves, and how it is made


@dataclass(frozen=True)
class OnPolicyRecipe:
    """How the target writes the drafters' training text; lengths in tokens."""

    num_prompts: int = 8192
    prompt_lengths: tuple[int, ...] = (48, 80, 112)
    max_new_tokens: int = 144
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7)
    seed: int = 0


def make_pair(work: Path, output: Path, packages: Path | None, processes: int) -> None:
    """Run all stages whose result is not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    recipe, target = TargetRecipe(), output / BUNDLED / "config.json"
    is_made = target.exists()
    tokenizer = AutoTokenizer.from_pretrained(output / BUNDLED) if is_made else None
    of_target: list[Stage] = [
        (f"target, stage {number}", stage_folder(work, recipe, number), partial(_pretrain, work, number, processes))
        for number in range(len(recipe.stages))
    ]
    of_target.append(("target, post-trained", work / "target-posttrained", partial(_posttrain, work, processes)))
    stages: list[Stage] = [
        ("corpus", work / "held_out.npy", partial(prepare_corpus, work, packages, recipe, tokenizer)),
        *([] if is_made else of_target),
        ("bf16 target", target, partial(export_target, work, output)),
        ("on-policy text", work / "on_policy.jsonl", partial(write_on_policy, work, output, processes)),
        ("Domino drafter", work / "domino" / WEIGHTS, partial(_train_drafter, work, output, processes, "domino")),
        ("DFlash baseline", work / "dflash" / WEIGHTS, partial(_train_drafter, work, output, processes, "dflash")),
        ("cards", work / "cards.done", partial(export_drafters, work, output)),
    ]
    for number, (name, result, make) in enumerate(stages, start=1):
        print(f"[{number}/{len(stages)}] {name}{' (already made)' if result.exists() else ''}", flush=True)
        if not result.exists():
            make()


def prepare_corpus(
    work: Path, packages: Path | None, recipe: TargetRecipe, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write token streams, held-out prompts and a tokenizer, unless one is given, to `work`."""
    if packages is None:
        packages = work / "packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*command, "-r", str(REQUIREMENTS)], check=True)
    modules = collect_modules(packages)
    shuffled = [modules[index] for index in np.random.default_rng(recipe.seed).permutation(len(modules))]
    train = [module for module in shuffled if not module.held_out]
    if tokenizer is None:
        texts = (module.text for module in train[:TOKENIZER_MODULES])
        tokenizer = train_tokenizer(texts, recipe.vocab_size, recipe.max_length)
    tokenizer.save_pretrained(work / "tokenizer")
    prompts = held_out_prompts(modules, num_prompts=50, seed=recipe.seed)
    (work / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    np.save(work / "train.npy", token_stream(train, tokenizer))
    np.save(work / "held_out.npy", token_stream([module for module in shuffled if module.held_out], tokenizer))


def token_stream(modules: list[Module], tokenizer) -> np.ndarray:
    """All modules as one stream of ids, an end-of-text token after each."""
    pieces = []
    for start in range(0, len(modules), 256):
        for ids in tokenizer([module.text for module in modules[start : start + 256]], verbose=False)["input_ids"]:
            pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(pieces)


def _pretrain(work: Path, stage: int, most_processes: int) -> None:
    micro_batches = TargetRecipe().stages[stage].micro_batches_per_step
    processes = max(count for count in range(1, most_processes + 1) if micro_batches % count == 0)
    torchrun(processes, "recipes.pretrain", f"--work={work}", f"--stage={stage}")


def _posttrain(work: Path, processes: int) -> None:
    torchrun(processes, "recipes.posttrain", f"--work={work}")


def export_target(work: Path, output: Path) -> None:
    """Save the target as bf16 shards with its tokenizer and held-out prompts; all later stages read this copy."""
    folder = output / BUNDLED
    target = AutoModelForCausalLM.from_pretrained(work / "target-posttrained", dtype=torch.bfloat16)
    target.generation_config.repetition_penalty = REPETITION_PENALTY
    target.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(folder)
    shutil.copy(work / "prompts.jsonl", folder)


def write_on_policy(work: Path, output: Path, processes: int) -> None:
    """Let the target continue training prompts in several processes, and gather the rows in `on_policy.jsonl`.

    Greedy continuations of held-out text go to `evaluation.jsonl`.
    """
    recipe = OnPolicyRecipe()
    with ProcessPoolExecutor(processes) as pool:
        parts = list(pool.map(_write_shard, [(work, output, shard, processes) for shard in range(processes)]))
    target = _load_target(output)
    held_out = np.load(work / "held_out.npy")
    prompts = training_prompts(held_out, NUM_EVALUATION_ROWS, recipe.prompt_lengths, _end_of_text(target), recipe.seed)
    continue_prompts(target, prompts, work / "evaluation.jsonl", recipe.max_new_tokens, (0.0,))
    result = work / "on_policy.jsonl"
    settings_file(result).write_text(json.dumps({"target": identify(target).to_dict()}), encoding="utf-8")
    result.write_text("".join(path.read_text() for path in parts))


def _write_shard(job: tuple[Path, Path, int, int]) -> Path:
    """One process's share of the on-policy text."""
    work, output, index, count = job
    torch.set_num_threads(1)
    recipe, target = OnPolicyRecipe(), _load_target(output, torch.bfloat16)  # half as slow as fp32
    stream = np.load(work / "train.npy", mmap_mode="r")
    prompts = training_prompts(stream, recipe.num_prompts, recipe.prompt_lengths, _end_of_text(target), recipe.seed)
    output = work / f"on_policy-{index}-of-{count}.jsonl"
    return continue_prompts(target, prompts, output, recipe.max_new_tokens, recipe.temperatures, (index, count))


def _load_target(output: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(output / BUNDLED, dtype=dtype).eval()


def _end_of_text(target: PreTrainedModel) -> int:
    return target.config.eos_token_id


def _train_drafter(work: Path, output: Path, processes: int, projector_type: str) -> None:
    texts = (f"--train_file={work / 'on_policy.jsonl'}", f"--eval_file={work / 'evaluation.jsonl'}")
    folders = (f"--target={output / BUNDLED}", f"--cache_hidden_states={work / 'hidden_states'}")
    where = (*folders, f"--output_dir={work / projector_type}")
    torchrun(min(processes, 2), HF_DOMINO, "train", str(DRAFTER), *where, *texts, *kind_flags(projector_type))


def export_drafters(work: Path, output: Path) -> None:
    """Save both drafters as bf16, and write the three cards."""
    folders = {kind: output / f"{BUNDLED}-{kind}" for kind in ("domino", "dflash")}
    for projector_type, folder in folders.items():
        drafter = DominoDraftModel.from_pretrained(work / projector_type, dtype=torch.bfloat16)
        drafter.save_pretrained(folder)
    write_cards(output / BUNDLED, work)
    (work / "cards.done").touch()
