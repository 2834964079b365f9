"""The GRU's input products of the tokens a generation has met.

Reading a token costs a product of its embedding with the GRU's input weights: at the sizes of a large target, most of
the rollout's memory traffic. It depends on the token alone, and text repeats its tokens; so on a CPU, where looking one
up costs nothing, every product is computed once, those of a block's likely tokens all together.

Shapes: N tokens, H hidden size, G width of the prefix state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_domino.kinds.domino import PrefixGRU
from hf_domino.target.view import TargetModel

MAX_BYTES = 2**25  # 5,461 tokens at the sizes of Qwen3-8B; all that is kept is dropped when it is full


class InputTable:
    """Input products by token, for the life of one generation.

    Args:
        gru ([`PrefixGRU`]): Gives the input weights.
        target ([`TargetModel`]): Gives the embeddings.
        max_bytes (`int`, *optional*, defaults to 32 MiB): Most memory to use.
    """

    def __init__(self, gru: PrefixGRU, target: TargetModel, max_bytes: int = MAX_BYTES):
        self._gru, self._target = gru, target
        self._places: dict[int, int] = {}
        width, weight = 3 * gru.hidden_size, gru.weight_ih_l0
        self._capacity = max_bytes // (width * weight.element_size())
        self._products = weight.new_empty(self._capacity, width)  # [capacity, 3G], touched as it fills

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return len(self._places) * self._products.shape[1] * self._products.element_size()

    def add(self, token_ids: Sequence[int]) -> None:
        """Compute the products of those tokens that are not there yet, all at once, as far as there is room."""
        missing = self._missing(token_ids)
        if len(self._places) + len(missing) > self._capacity:
            self._places.clear()
            missing = self._missing(token_ids)[: self._capacity]
        if missing:
            first = len(self._places)
            self._places |= {token: first + index for index, token in enumerate(missing)}
            self._products[first : len(self._places)] = self._compute(missing)

    def rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Input products `[N, 3G]` of N tokens."""
        self.add(token_ids)
        places = [self._places.get(token, -1) for token in token_ids]
        if min(places) < 0:  # more tokens at once than there is room for
            return self._compute(token_ids)
        return self._products[places[0] : places[0] + 1] if len(places) == 1 else self._products[places]

    def _missing(self, token_ids: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(token for token in token_ids if token not in self._places))

    def _compute(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(token_ids, device=self._products.device)
        return self._gru.project_inputs(self._target.embed(ids).to(self._products))
