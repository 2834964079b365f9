"""The GRU's input products of the tokens a generation has met.

Reading a token costs a product of its embedding with the GRU's input weights: at the sizes of a large target, most of
the time of a chain. It depends on the token alone, and text repeats its tokens; so on a CPU, where looking one up costs
nothing, every product is computed once, those of a block's likely tokens all together.

Shapes: N tokens, H hidden size, G width of the prefix state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_domino.methods.domino import PrefixGRU
from hf_domino.target.view import TargetModel

MAX_BYTES = 2**25  # 5,461 tokens at the sizes of Qwen3-8B; all that is kept is dropped when it is full


class InputTable:
    """Input products by token, for the life of one generation.

    Args:
        gru ([`PrefixGRU`]): Gives the input weights.
        target ([`TargetModel`]): Gives the embeddings.
        max_bytes (`int`, *optional*, defaults to 32 MiB): Memory from which on nothing is added to what is kept.
    """

    def __init__(self, gru: PrefixGRU, target: TargetModel, max_bytes: int = MAX_BYTES):
        self._gru = gru
        self._target = target
        self._most = max_bytes // (3 * gru.hidden_size * gru.weight_ih_l0.element_size())
        self._products: dict[int, torch.Tensor] = {}  # [3G] each

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(products.nbytes for products in self._products.values())

    def add(self, token_ids: Sequence[int]) -> None:
        """Compute the products of those tokens that are not there yet, all at once."""
        if len(self._products) >= self._most:
            self._products.clear()
        if missing := [token for token in dict.fromkeys(token_ids) if token not in self._products]:
            weight = self._gru.weight_ih_l0
            embeds = self._target.embed(torch.tensor(missing, device=weight.device))
            products = self._gru.project_inputs(embeds.to(weight)).to(weight)  # autocast makes them narrow
            self._products |= zip(missing, products.unbind(), strict=True)

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Input products `[N, 3G]` of N tokens."""
        self.add(token_ids)
        if len(token_ids) == 1:
            return self._products[token_ids[0]][None]
        return torch.stack([self._products[token] for token in token_ids])
