"""A table of the GRU's input products for the tokens that have occurred in a generation.

To read a token, the GRU multiplies the token's embedding by its input weights. With a large target, this takes most of
the time of a chain. The product depends on the token alone, and tokens repeat in a text. So on a CPU, where a lookup
costs almost nothing, every product is computed only once, and those of a block's likely tokens are computed together.

Shapes: N tokens, H hidden size, G width of the prefix state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_domino.targets.view import TargetModel

MAX_BYTES = 2**25  # enough for 5,461 tokens with the sizes of Qwen3-8B; a full table is emptied


class InputTable:
    """The input products of tokens, kept for one generation.

    Args:
        gru ([`PrefixGRU`]): Provides the input weights.
        target ([`TargetModel`]): Provides the embeddings.
        max_bytes (`int`, *optional*, defaults to 32 MiB): Memory limit. When it is reached, the table is emptied before
            new products are added.
    """

    def __init__(self, gru: Any, target: TargetModel, max_bytes: int = MAX_BYTES):
        self._gru = gru
        self._target = target
        self._most = max_bytes // (3 * gru.hidden_size * gru.weight_ih_l0.element_size())
        self._products: dict[int, torch.Tensor] = {}  # [1, 3G] each

    @property
    def num_bytes(self) -> int:
        """The memory in use."""
        return sum(products.nbytes for products in self._products.values())

    def add(self, token_ids: Sequence[int]) -> None:
        """Compute the products of those tokens that are not in the table yet, all at once."""
        if len(self._products) >= self._most:
            self._products.clear()
        if missing := [token for token in dict.fromkeys(token_ids) if token not in self._products]:
            weight = self._gru.weight_ih_l0
            embeds = self._target.embed(torch.tensor(missing, device=weight.device))
            products = self._gru.project_inputs(embeds.to(weight)).to(weight)  # undo the lower precision of autocast
            self._products |= zip(missing, products.split(1), strict=True)

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The input products `[N, 3G]` of N tokens."""
        self.add(token_ids)
        if len(token_ids) == 1:
            return self._products[token_ids[0]]
        return torch.cat([self._products[token] for token in token_ids])
