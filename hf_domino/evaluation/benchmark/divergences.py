"""Find where texts diverge from those of plain generation, and how close to a tie the two tokens are there.

Shapes: B batch, N new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch

from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.data.writers import cut_at_end
from hf_domino.targets.view import rounded_to

# Largest margin that still counts as a tie, in units in the last place of the largest logit. In bf16, margins after
# twelve layers were up to half a unit; deeper targets round more.
TIE_ROUNDINGS = 4


def find_divergences(target: Any, inputs: Any, tokens: torch.Tensor, seed: int, **plain: Any) -> list[dict[str, Any]]:
    """Find the first token in each sequence of `[B, N]` that differs from plain generation with these arguments."""
    torch.manual_seed(seed)
    alone = target.generate(**inputs, **plain, return_dict_in_generate=True, output_scores=True, output_logits=True)
    own = alone.sequences[:, inputs["input_ids"].shape[1] :]
    ends = eos_ids_of(target.generation_config)
    noises = [torch.zeros_like(scores) for scores in alone.scores]  # [B, V] of each decode step
    if plain.get("do_sample"):  # `torch.multinomial` draws the token with the largest sum of score and noise
        generator = torch.Generator(own.device).manual_seed(seed)
        noises = [-noise.exponential_(generator=generator).log() for noise in noises]
    found: list[dict[str, Any]] = []
    for sequence, texts in enumerate(zip(own.tolist(), tokens.tolist(), strict=True)):
        pairs = list(zip_longest(*(cut_at_end(text, ends).ids for text in texts)))
        at = next((place for place, (expected, token) in enumerate(pairs) if token != expected), None)
        if at is None:
            continue
        margin = math.inf  # stays so if a text ended in the wrong place; a forbidden token gives it, too
        tie = 0.0
        if None not in pairs[at]:
            expected, token = (alone.scores[at][sequence] + noises[at][sequence])[list(pairs[at])].tolist()
            logits = alone.logits[at][sequence]
            scale = float(torch.where(logits.isfinite(), logits.abs(), 0.0).max())
            margin = expected - token
            tie = TIE_ROUNDINGS * torch.finfo(rounded_to(target)).eps * scale
        finite = margin if math.isfinite(margin) else None
        found.append({"sequence": sequence, "position": at, "margin": finite, "tie": tie})
    return found
