"""What all variants train on: one set of prompts, and what the target writes after them, greedily and at T 0.7.

A folder of texts holds `plain.jsonl` (prompts with the text they were cut from), `greedy.jsonl` and `sampled.jsonl`
(the same prompts, continued by the target), `mixed.jsonl` (every other row of each) and `evaluation.jsonl` (greedy
continuations of held-out prompts). Row i of the first four has the same prompt. Of files that the target wrote already
there are `mixed.jsonl` and `evaluation.jsonl` alone.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.dtypes import fast_dtype
from hf_domino._common.errors import invalid_argument
from hf_domino.data.rows import load_rows
from recipes.bundled import OnPolicyRecipe, prepare_corpus
from recipes.continuing import continue_prompts
from recipes.pretrain import TargetRecipe
from recipes.prompts import training_prompts
from study.plan import TEXTS

EVALUATION, MIXED, PLAIN, HELD_OUT = "evaluation", TEXTS[0], TEXTS[-1], "held_out"
SEED = 0
Row = dict[str, Any]


def text_of_corpus(work: Path, packages: Path | None, target: str, num_rows: int, num_texts: int, tokens: int) -> Path:
    """Let the target continue prompts cut from the bundled pair's corpus, unless it did; the folder of texts."""
    folder, recipe = work / f"texts-{num_rows}-{num_texts}", OnPolicyRecipe()
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / f"{MIXED}.jsonl").exists():
        return folder
    tokenizer = AutoTokenizer.from_pretrained(target)
    if not (work / "held_out.npy").exists():
        # The ids of another tokenizer, though trained on the same corpus, are no text to the target.
        prepare_corpus(work, packages, TargetRecipe(), tokenizer)
    prompts = {}
    for name, stream, count in ((PLAIN, "train", num_rows), (HELD_OUT, HELD_OUT, num_texts)):
        lengths = [length + tokens for length in recipe.prompt_lengths]
        ids = np.load(work / f"{stream}.npy", mmap_mode="r")
        pieces = sorted(training_prompts(ids, count, lengths, tokenizer.eos_token_id, recipe.seed), key=len)
        write_rows(
            folder / f"{name}.jsonl", [{"input_ids": piece, "prompt_length": len(piece) - tokens} for piece in pieces]
        )
        prompts[name] = [piece[:-tokens] for piece in pieces]
    for name, asked, temperature in (("greedy", PLAIN, 0.0), ("sampled", PLAIN, 0.7), (EVALUATION, HELD_OUT, 0.0)):
        # What is measured on must be exact; what is trained on takes half the time in bf16 where the CPU has it.
        dtype = torch.float32 if name == EVALUATION else fast_dtype("cpu")
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        path = folder / f"{name}.jsonl"
        continue_prompts(model, prompts[asked], path, tokens, (temperature,))
    greedy, sampled = (read_rows(folder / f"{kind}.jsonl") for kind in ("greedy", "sampled"))
    pairs = enumerate(zip(greedy, sampled, strict=True))
    write_rows(folder / f"{MIXED}.jsonl", [pair[index % 2] for index, pair in pairs])
    return folder


def text_of_files(work: Path, files: Sequence[Path], target: str, counts: Sequence[int], max_length: int) -> Path:
    """Take rows of one answer from files that the target wrote, of training and evaluation; the folder of texts."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    folder = work / f"texts-{counts[0]}-{counts[1]}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, file, count in zip((MIXED, EVALUATION), files, counts, strict=True):
        read = load_rows(file, AutoTokenizer.from_pretrained(target), max_length)
        every = [read[index] for index in range(len(read))]
        rows = [{field: list(map(int, row[field])) for field in ("input_ids", "loss_mask")} for row in every]
        rows = [row for row in rows if "10" not in "".join(map(str, row["loss_mask"]))]
        if len(rows) < count:
            raise invalid_argument(
                str(file), f"a file of at least {count} rows for this --budget", len(rows), "Add rows."
            )
        write_rows(folder / f"{name}.jsonl", random.Random(SEED).sample(rows, count))
    return folder


def digest_of(folder: Path) -> str:
    """A short digest of all texts of a folder: equal where all runs had the same data."""
    files = [path for kind in (*TEXTS, EVALUATION) if (path := folder / f"{kind}.jsonl").exists()]
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()[:16]


def read_rows(path: Path) -> list[Row]:
    """Rows of one of these files."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write one of these files, whole or not at all."""
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
