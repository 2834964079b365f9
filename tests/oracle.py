"""A drafter that knows the future: random drafters accept almost nothing, and rollback must be tested."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from hf_domino.decoding import drafting


@contextlib.contextmanager
def oracle(target: PreTrainedModel, prompt: torch.Tensor, accuracy: float, **generate_kwargs) -> Iterator[None]:
    """Swap each greedily drafted token for the target's own continuation with probability `accuracy`.

    Args:
        target (`PreTrainedModel`): The target, whose plain greedy text is the truth.
        prompt (`torch.Tensor`): Prompt of the calls inside the block, `[batch, length]`.
        accuracy (`float`): Probability that a drafted token is replaced, in `[0, 1]`.
        generate_kwargs: What the calls inside pass to `generate`; without an end-of-text token.
    """
    plain = {"eos_token_id": -1} | generate_kwargs | {"return_dict_in_generate": False}
    truth = target.generate(prompt, **plain).tolist()
    draws, propose = random.Random(0), drafting.DraftSession.propose

    def propose_truth(self, prefixes, *args, **kwargs):
        proposal = propose(self, prefixes, *args, **kwargs)
        for index, (row, start) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            for k in range(proposal.tokens.shape[1]):
                if start + k < len(truth[row]) and draws.random() < accuracy:
                    proposal.tokens[index, k] = truth[row][start + k]
        return proposal

    drafting.DraftSession.propose = propose_truth
    try:
        yield
    finally:
        drafting.DraftSession.propose = propose
