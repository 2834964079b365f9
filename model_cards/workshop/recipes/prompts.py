"""Prompts cut from modules: held-out ones to measure on, training ones for the target to continue."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from recipes.corpus import Module

PROMPT_CHARACTERS = 350  # about a hundred tokens


def held_out_prompts(modules: Sequence[Module], num_prompts: int, seed: int) -> list[dict[str, Any]]:
    """Cut prompts from the held-out modules of the standard library, whole lines each, spread over the modules."""
    held_out = [module for module in modules if module.held_out and module.source == "stdlib"]
    generator = random.Random(seed)
    starts = [(module, offset) for module in held_out for offset in _sample_starts(module.text, generator)]
    generator.shuffle(starts)
    if len(starts) < num_prompts:
        raise ValueError(f"num_prompts must be at most {len(starts)} for these modules, got {num_prompts}.")
    return [_prompt(module, offset) for module, offset in starts[:num_prompts]]


def _sample_starts(text: str, generator: random.Random) -> list[int]:
    """Offsets of up to four lines that start a statement and have enough text behind them."""
    offsets, position = [], 0
    for line in text.splitlines(keepends=True):
        if line[:1].isalpha() and position + 3 * PROMPT_CHARACTERS < len(text):
            offsets.append(position)
        position += len(line)
    return generator.sample(offsets, min(4, len(offsets)))


def _prompt(module: Module, offset: int) -> dict[str, Any]:
    end = module.text.index("\n", offset + PROMPT_CHARACTERS)
    text = module.text[offset:end]
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"module": module.name, "offset": offset, "sha256": digest, "text": text}


def training_prompts(
    stream: np.ndarray, num_prompts: int, lengths: Sequence[int], end_of_text: int, seed: int
) -> list[list[int]]:
    """Cut prompts of these lengths, in turn, at random places of a stream of tokens, none across two documents."""
    generator = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    while len(prompts) < num_prompts:
        length = lengths[len(prompts) % len(lengths)]
        start = int(generator.integers(len(stream) - length))
        ids = stream[start : start + length].tolist()
        if end_of_text not in ids:
            prompts.append(ids)
    return prompts
