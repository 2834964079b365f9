"""Where texts part from plain generation's, and how near to a tie that is.

Shapes: B batch, N new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import zip_longest
from typing import Any

import torch

from hf_domino.evaluation.benchmark.rows import Row
from hf_domino.target.view import rounded_to

# Units in the last place of the largest logit. Measured in bf16: margins up to half of one behind twelve layers; deeper
# targets round more.
TIE_ROUNDINGS = 4


def partings(target: Any, inputs: Any, tokens: torch.Tensor, seed: int, **plain: Any) -> list[Row]:
    """Find the first token of each row of `[B, N]` that plain generation, called so, does not write."""
    torch.manual_seed(seed)
    alone = target.generate(**inputs, **plain, return_dict_in_generate=True, output_scores=True, output_logits=True)
    own, ends = alone.sequences[:, inputs["input_ids"].shape[1] :], target.generation_config.eos_token_id
    luck = [torch.zeros_like(scores) for scores in alone.scores]  # [B, V] of each step
    if plain.get("do_sample"):  # added to scores, the largest sum is what `torch.multinomial` draws
        generator = torch.Generator(own.device).manual_seed(seed)
        luck = [-noise.exponential_(generator=generator).log() for noise in luck]
    found: list[Row] = []
    for row, texts in enumerate(zip(own.tolist(), tokens.tolist(), strict=True)):
        pairs = list(zip_longest(*(until_end(text, ends) for text in texts)))
        at = next((place for place, (expected, token) in enumerate(pairs) if token != expected), None)
        if at is None:
            continue
        # Infinite where a text ended in the wrong place or a token was forbidden.
        margin, tie = math.inf, 0.0
        if None not in pairs[at]:
            expected, token = (alone.scores[at][row] + luck[at][row])[list(pairs[at])].tolist()
            logits = alone.logits[at][row]
            scale = float(torch.where(logits.isfinite(), logits.abs(), 0.0).max())
            margin, tie = expected - token, TIE_ROUNDINGS * torch.finfo(rounded_to(target)).eps * scale
        found.append({"row": row, "position": at, "margin": margin if math.isfinite(margin) else None, "tie": tie})
    return found


def until_end(tokens: list[int], end_of_text: int | list[int] | None) -> list[int]:
    """A row of tokens up to its first end-of-text token, without the padding behind it."""
    ends = end_of_text if isinstance(end_of_text, list) else [end_of_text]
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]
