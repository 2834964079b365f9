"""Make the bundled pair from nothing: corpus, tokenizer, target, on-policy text, drafter and its DFlash twin.

Every stage leaves its result in the work folder and is skipped if that is there, so the command can be interrupted and
called again. A target that is in the output folder already is kept, and drafters are made for it. The seed is fixed;
the committed target was made with 3 processes for its first stage and 4 for the others, the drafters with 2.
"""

from __future__ import annotations

import argparse
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

from hf_domino.configuration import DominoConfig
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.pair import BUNDLED, dflash_folder, domino_folder
from hf_domino.target.identity import TargetIdentity, check_same, identify
from recipes.cards import write_cards
from recipes.corpus import REQUIREMENTS, Module, collect_modules
from recipes.pretrain import TargetRecipe, stage_folder
from recipes.processes import kind_flags, torchrun
from recipes.prompts import held_out_prompts, training_prompts, write_prompts
from recipes.tokenizer import train_tokenizer
from study.texts import continue_prompts, settings_file

MAX_SHARD_SIZE = "12MB"
TOKENIZER_MODULES = 2500
REPETITION_PENALTY = 1.04  # part of the target: a small model that writes greedily would loop without it
NUM_EVALUATION_ROWS = 64


# Its name, what it leaves, and how it is made.
Stage = tuple[str, Path, Callable[[], None]]


@dataclass(frozen=True)
class OnPolicyRecipe:
    """How the target writes the drafters' training text; lengths in tokens."""

    num_prompts: int = 8192
    prompt_lengths: tuple[int, ...] = (48, 80, 112)
    max_new_tokens: int = 144
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7)
    seed: int = 0


def make_pair(options: argparse.Namespace, commands: str) -> int:
    """Run all stages whose result is not there yet; drafters by the command `train` of the module `commands`."""
    work, recipe = options.work, TargetRecipe()
    work.mkdir(parents=True, exist_ok=True)
    train = partial(_train_drafter, work, options, commands)
    of_target: list[Stage] = [
        *(
            (
                f"target, stage {i}",
                stage_folder(work, recipe, i),
                partial(_pretrain, work, recipe, i, options.processes),
            )
            for i in range(len(recipe.stages))
        ),
        ("target, post-trained", work / "target-posttrained", lambda: _posttrain(work, options.processes)),
        ("bf16 target", options.output / BUNDLED / "config.json", lambda: export_target(work, options.output)),
    ]
    made = of_target[-1][1].exists()
    tokenizer = AutoTokenizer.from_pretrained(options.output / BUNDLED) if made else None
    stages: list[Stage] = [
        ("corpus", work / "held_out.npy", lambda: prepare_corpus(work, options.packages, recipe, tokenizer)),
        *(of_target[-1:] if made else of_target),
        ("on-policy text", work / "on_policy.jsonl", lambda: write_on_policy(work, options.output, options.processes)),
        (
            "Domino drafter",
            work / "domino/model.safetensors",
            lambda: train("domino"),
        ),
        ("DFlash twin", work / "dflash/model.safetensors", lambda: train("dflash")),
        ("cards", work / "cards.done", lambda: export_drafters(work, options.output)),
    ]
    for number, (name, result, make) in enumerate(stages, start=1):
        print(f"[{number}/{len(stages)}] {name}{' (already made)' if result.exists() else ''}", flush=True)
        if result.exists():
            check_belongs(result, options.output)
        else:
            make()
    return 0


def check_belongs(result: Path, output: Path) -> None:
    """Refuse to go on from a text or a drafter that was made with another target than the one in `output`.

    Raises:
        ValueError: If it names another target; naming what to delete.
    """
    recorded = None
    if (settings := settings_file(result)).exists():
        recorded = TargetIdentity.from_dict(json.loads(settings.read_text(encoding="utf-8")).get("target"))
    elif result.name == "model.safetensors":
        recorded = TargetIdentity.recorded_in(DominoConfig.from_pretrained(result.parent))
    if recorded is not None:
        stale = result.parent if result.name == "model.safetensors" else result
        check_same(recorded, identify(_load_target(output)), str(stale), f"Delete {stale} and call the command again.")


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
    write_prompts(held_out_prompts(modules, num_prompts=50, seed=recipe.seed), work / "prompts.jsonl")
    np.save(work / "train.npy", _tokenize(train, tokenizer))
    np.save(work / "held_out.npy", _tokenize([module for module in shuffled if module.held_out], tokenizer))


def _tokenize(modules: list[Module], tokenizer) -> np.ndarray:
    """All modules as one stream of ids, an end-of-text token after each."""
    pieces = []
    for start in range(0, len(modules), 256):
        for ids in tokenizer([module.text for module in modules[start : start + 256]], verbose=False)["input_ids"]:
            pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
    return np.concatenate(pieces)


def _pretrain(work: Path, recipe: TargetRecipe, stage: int, most_processes: int) -> None:
    micro_batches = recipe.stages[stage].micro_batches_per_step
    processes = max(count for count in range(1, most_processes + 1) if micro_batches % count == 0)
    torchrun(processes, "recipes.pretrain", f"--work={work}", f"--stage={stage}")


def _posttrain(work: Path, processes: int) -> None:
    torchrun(min(processes, 4), "recipes.posttrain", f"--work={work}")


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


def _train_drafter(work: Path, options: argparse.Namespace, commands: str, projector_type: str) -> None:
    torchrun(
        2 if options.processes > 1 else 1,
        commands,
        "train",
        str(Path(__file__).with_name("drafter.yaml")),
        f"--target={options.output / BUNDLED}",
        f"--train_file={work / 'on_policy.jsonl'}",
        f"--eval_file={work / 'evaluation.jsonl'}",
        f"--cache_hidden_states={work / 'hidden_states'}",
        *kind_flags(projector_type),
        f"--output_dir={work / projector_type}",
    )


def export_drafters(work: Path, output: Path) -> None:
    """Save both drafters as bf16, and write the three cards."""
    folders = {"domino": domino_folder(output / BUNDLED), "dflash": dflash_folder(output / BUNDLED)}
    for projector_type, folder in folders.items():
        drafter = DominoDraftModel.from_pretrained(work / projector_type, dtype=torch.bfloat16)
        drafter.save_pretrained(folder)
    write_cards(output / BUNDLED, work)
    (work / "cards.done").touch()
