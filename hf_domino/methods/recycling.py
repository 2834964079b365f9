"""Token recycling: no weights, but a table of each token's likeliest successors (arXiv 2408.08696).

What the target makes of a position, accepted or not, is thrown away by others. Here the M likeliest tokens of each
verified position replace those that the table has for the token there, and later rounds propose trees of them.

Shapes: N positions of a verification forward, of all rows, M successors, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_domino.methods.kind import HEAD_FIELDS, ONE_LAYER, Kind

NUM_SUCCESSORS = 8  # of a token (arXiv 2408.08696)


class Recycling(Kind):
    """Token recycling. The table has each token's successors and their scores."""

    title = "token recycling"
    link = "[token recycling](https://arxiv.org/abs/2408.08696)"
    defaults = {"block_size": 8, "num_hidden_layers": 1, "draft_tree_size": 32}
    fixed = ONE_LAYER | {"draft_vocab_size": None}
    has_table = True
    unread = ("intermediate_size", "mask_token_id", *HEAD_FIELDS)
    lacks = dict.fromkeys(
        ("training", "export", "save_pretrained", "check_fit", "explain_round"),
        "It has no weights, and fills its table while hf_domino's own loop generates.",
    ) | {"cache_implementation='static'": "Its trees are no rounds of fixed shape yet; leave it out."}

    @classmethod
    def layer_ids(cls, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """See [`Kind`]. It reads none: the last one's costs least."""
        return [num_target_layers - 1]

    def build(self) -> None:
        """See [`Kind`]. Successors of a token that was not seen have no chance."""
        size = self.config.vocab_size, min(NUM_SUCCESSORS, self.config.vocab_size)
        self.drafter.successors = nn.Parameter(torch.arange(size[1]).repeat(size[0], 1), requires_grad=False)
        self.drafter.scores = nn.Parameter(torch.full(size, -torch.inf), requires_grad=False)


def learn(drafter: Any, tokens: torch.Tensor, logits: torch.Tensor) -> None:
    """Take successors of tokens `[N]` from logits `[N, V]`; of a token that stands twice the first ones."""
    table, scores = drafter.successors, drafter.scores
    best = logits.topk(table.shape[1], dim=1)
    places = torch.arange(len(tokens), device=tokens.device)
    # Of all that write to a row, each writes the same: in which order they do is not known everywhere.
    first = places.new_full((len(table),), len(tokens)).scatter_reduce(0, tokens, places, "amin")[tokens]
    table[tokens], scores[tokens] = best.indices[first], best.values[first].to(scores)
