"""What the tests of kinds ask of a call: its text, and what was drafted."""

from __future__ import annotations

import torch
from builders import left_padded

PROMPTS = [torch.arange(7, 19), torch.arange(9, 14), torch.arange(30, 39)]
NEW_TOKENS, TEMPERATURE, SEED = 30, 0.8, 5
SAMPLED = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0}


def tree_of(grown, row):
    """Chances of a tree's nodes, by the tokens from the anchor to each."""
    paths = [()]
    parents = range(grown.num_nodes) if grown.parents is None else grown.parents[row].tolist()
    for token, parent in zip(grown.tokens[row].tolist(), parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], grown.chances[row].tolist(), strict=True))


def noise_of(batch_size, vocab_size):
    """What plain generation draws its steps with; none behind the last."""
    torch.manual_seed(SEED)
    drawn = [torch.empty(batch_size, vocab_size).exponential_() for _ in range(NEW_TOKENS)]
    return torch.stack(drawn + [torch.ones(batch_size, vocab_size)] * NEW_TOKENS)


def generate(target, drafter, ids, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 2} | options
    torch.manual_seed(SEED)
    return target.generate(ids, **options, assistant_model=drafter)


def calls(batch_size):
    ids, mask = left_padded(PROMPTS[:batch_size], pad=2)
    return ids, {"attention_mask": mask}
