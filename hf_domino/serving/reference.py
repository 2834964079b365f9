"""What a server is compared with: Transformers' greedy texts of some prompts, and the rounds of our own loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.pair import Pair
from hf_domino.serving.client import Answers


def encoded(pair: Pair, prompts: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Token ids of prompts, a list each, as both sides get them.

    Args:
        pair ([`Pair`]): Gives the tokenizer.
        prompts (`Iterable[dict]`): With `text` or `messages`.
    """
    return [encode(pair.tokenizer, [prompt])["input_ids"][0].tolist() for prompt in prompts]


def reference(
    pair: Pair, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_proposals: int | None = None
) -> Answers:
    """Generate with Transformers as a server is asked to: greedily, past the end of a text, without penalties.

    Args:
        pair ([`Pair`]): The target, whose generation configuration is replaced, and the drafter.
        prompts (`Sequence`): Token ids of each.
        max_new_tokens (`int`): Tokens of each answer.
        num_proposals (`int`, *optional*): Proposals of a round of our loop, in blocks of no more; without it the target
            generates alone.

    Returns:
        [`Answers`]: Texts, and rounds where there are proposals.
    """
    pair.target.generation_config = GenerationConfig(pad_token_id=pair.tokenizer.pad_token_id or 0)
    drafter, arguments = pair.drafter, {}
    if num_proposals is not None:  # of fewer the server makes shorter blocks
        drafter = drafter.view(draft_length="full", block_size=1 + num_proposals)
        arguments = {"assistant_model": drafter, "num_assistant_tokens": num_proposals}
    texts, lengths, start = [], [], time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=pair.target.device)
        mask = torch.ones_like(ids)
        found = pair.target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, **arguments
        )
        texts.append(found[0, len(prompt) :].tolist())
        lengths += drafter.stats.rows[0] if arguments else []
    seconds = time.perf_counter() - start
    accepted = tuple(sum(length > 1 + position for length in lengths) for position in range(num_proposals or 0))
    return Answers(texts, seconds, len(lengths), accepted)
