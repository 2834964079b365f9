"""Fine-tune a target on other text than its drafter knows, and train the drafter further: an adapter, or all of it.

The bundled target, which writes Python, learns C++ by LoRA from the headers that torch installs, without those that are
generated. It then writes the text on which the bundled drafter is measured as it was, with a LoRA adapter of its own,
and trained whole, at equal steps (`study/adapter.yaml`). Stages whose result is there are not done again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

from hf_domino.pair import find_target
from recipes.bundled import token_stream
from recipes.continuing import continue_prompts
from recipes.corpus import Module, clean, reads_like_code
from recipes.prompts import training_prompts
from study.plan import STUDY_FILE, load_study
from study.run import conduct
from study.texts import EVALUATION, MIXED

STUDY = STUDY_FILE.with_name("adapter.yaml")
ROWS, HELD_OUT = "adapter.jsonl", "held_out"
FOLDERS = ("ATen", "c10", "torch")  # of torch's headers
GENERATED = {"ops", "ops_generated"}


class AdapterRecipe(NamedTuple):
    """Sizes and schedule; lengths in tokens."""

    steps: int = 100  # of the target
    batch_size: int = 8
    length: int = 160
    lora_r: int = 16
    learning_rate: float = 3e-3
    prompt_length: int = 48
    max_new_tokens: int = 96
    temperature: float = 0.7  # greedily so small a model repeats itself
    budget: str = "default"
    seed: int = 0


def compare_adapter(work: Path, output: Path, processes: int, recipe: AdapterRecipe | None = None) -> int:
    """Make the target and its text in `work`, and add the rows of the study to `output`; 1 if a training failed."""
    recipe = recipe or AdapterRecipe()
    target, texts, study = work / "pycoder-13m-cpp", work / "texts", load_study(STUDY)
    texts.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(find_target())
    headers = read_headers(Path(torch.__file__).parent / "include")
    for name, is_held_out in ((MIXED, False), (HELD_OUT, True)):
        chosen = [module for module in headers if module.held_out == is_held_out]
        if not (work / f"{name}.npy").exists():
            np.save(work / f"{name}.npy", token_stream(chosen, tokenizer))
    if not (target / "config.json").exists():
        tune_target(np.load(work / f"{MIXED}.npy"), target, work / "tuning", recipe)
        tokenizer.save_pretrained(target)
    size = study.budget(recipe.budget)
    for name, stream, count in ((MIXED, MIXED, study.num_rows(size)), (EVALUATION, HELD_OUT, size.texts)):
        if not (texts / f"{name}.jsonl").exists():
            model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
            ids, end = np.load(work / f"{stream}.npy"), tokenizer.eos_token_id
            prompts = training_prompts(ids, count, (recipe.prompt_length,), end, recipe.seed)
            continue_prompts(model, prompts, texts / f"{name}.jsonl", recipe.max_new_tokens, (recipe.temperature,))
    return conduct(study, study.runs(), str(target), texts, recipe.budget, work, output / ROWS, processes)


def read_headers(include: Path) -> list[Module]:
    """The C++ headers that torch installs and that somebody wrote, in an order of chance."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (include / folder).rglob("*.h")):
        if not GENERATED.intersection(path.parts):
            text = clean(path.read_text(encoding="utf-8", errors="replace"))
            if reads_like_code(text):
                found.append(Module("torch", path.relative_to(include).as_posix(), text))
    return [found[index] for index in np.random.default_rng(AdapterRecipe().seed).permutation(len(found))]


def tune_target(stream: np.ndarray, folder: Path, work: Path, recipe: AdapterRecipe) -> None:
    """Train LoRA over the bundled target on a stream of tokens, and save it merged."""
    from peft import LoraConfig, get_peft_model

    set_seed(recipe.seed)
    target = AutoModelForCausalLM.from_pretrained(find_target(), dtype=torch.float32)
    lora = LoraConfig(r=recipe.lora_r, lora_alpha=2 * recipe.lora_r, target_modules="all-linear")
    rows = stream[: len(stream) // recipe.length * recipe.length].astype(np.int64).reshape(-1, recipe.length)
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=recipe.steps // 20,
        bf16=True,
        use_cpu=True,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        seed=recipe.seed,
    )
    trainer = Trainer(
        model=get_peft_model(target, lora),
        args=arguments,
        train_dataset=list(torch.from_numpy(rows)),
        data_collator=lambda items: dict.fromkeys(("input_ids", "labels"), torch.stack(items)),
    )
    trainer.train()
    merged = trainer.model.merge_and_unload()
    merged.config.use_cache = True  # the trainer switches it off
    merged.save_pretrained(folder)
