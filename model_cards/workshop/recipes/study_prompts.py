"""Prompts of a study of the bundled pair: cut from the corpus of its recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from recipes.bundled import OnPolicyRecipe, prepare_corpus
from recipes.pretrain import TargetRecipe
from recipes.prompts import training_prompts

RECIPE = OnPolicyRecipe()
STREAMS = {"plain": "train.npy", "held_out": "held_out.npy"}


def rows_of_corpus(
    work: Path, packages: Path | None, target: str, max_new_tokens: int
) -> Callable[[str, int], list[dict[str, Any]]]:
    """The `rows` of a study's source, cut from the corpus, which is made when they are first asked for."""

    def rows(name: str, count: int) -> list[dict[str, Any]]:
        if not (work / STREAMS["held_out"]).exists():
            # The ids of another tokenizer, though trained on the same corpus, are no text to the target.
            prepare_corpus(work, packages, TargetRecipe(), AutoTokenizer.from_pretrained(target))
        end = AutoConfig.from_pretrained(target).get_text_config(decoder=True).eos_token_id
        lengths = [length + max_new_tokens for length in RECIPE.prompt_lengths]
        stream = np.load(work / STREAMS[name], mmap_mode="r")
        pieces = training_prompts(stream, count, lengths, end, RECIPE.seed)
        return [{"input_ids": ids, "prompt_length": len(ids) - max_new_tokens} for ids in pieces]

    return rows
