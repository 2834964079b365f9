"""The rows of a target's lm_head that a draft vocabulary needs, copied once instead of every round.

Shapes: D tokens of the draft vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from hf_domino.formats.draft_vocabulary import ids_of

COMPARED = 16  # rows, about


class _Rows:
    """Rows of one lm_head, `[D, H]`, with their biases `[D]` if it has any, and what they were copied from."""

    def __init__(self, head: nn.Linear, token_ids: torch.Tensor, source: tuple):
        self.source = source
        with torch.inference_mode(False), torch.no_grad():  # also trained through
            self.weight = head.weight.index_select(0, token_ids)
            self.bias = None if head.bias is None else head.bias.index_select(0, token_ids)

    def renew(self, head: nn.Linear, token_ids: torch.Tensor, source: tuple) -> bool:
        """Copy them again to where they are, if they fit there: captured graphs know the address."""
        fresh = _Rows(head, token_ids, source)
        if (fresh.weight.shape, fresh.weight.dtype, fresh.weight.device, fresh.bias is None) != (
            self.weight.shape, self.weight.dtype, self.weight.device, self.bias is None
        ):  # fmt: skip
            return False
        self.weight.copy_(fresh.weight)
        if self.bias is not None and fresh.bias is not None:
            self.bias.copy_(fresh.bias)
        self.source = source
        return True

    def is_as_in(self, head: nn.Linear, token_ids: torch.Tensor) -> bool:
        """Whether a sample of them is what the lm_head holds; reads a result back."""
        step = max(1, len(token_ids) // COMPARED)
        some = token_ids[::step]
        return torch.equal(head.weight[some], self.weight[::step]) and (
            head.bias is None or self.bias is None or torch.equal(head.bias[some], self.bias[::step])
        )


class HeadRows:
    """A draft vocabulary's rows of the lm_heads that it met, copied once for each, and again where weights changed.

    Keeps no lm_head alive. A drafter and its views share it; copies of a drafter begin with an empty one.
    """

    def __init__(self) -> None:
        self._rows: WeakKeyDictionary[nn.Module, _Rows] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def of(self, head: nn.Linear, d2t: torch.Tensor, compares: bool = False) -> _Rows:
        """The rows of an lm_head.

        Args:
            head (`nn.Linear`): With its weights in memory.
            d2t (`torch.Tensor`): `[D]`, see [`ReducedVocabulary`].
            compares (`bool`, *optional*, defaults to `False`): Whether to look for what left no trace, a write to
                `weight.data` such as PEFT's merge; it reads a result back.
        """
        source = tuple(_trace(tensor) for tensor in (head.weight, head.bias, d2t))
        found = self._rows.get(head)
        if found is not None and found.source == source and not compares:
            return found
        token_ids = ids_of(d2t).to(head.weight.device)
        if found is not None and found.source == source and found.is_as_in(head, token_ids):
            return found
        if found is None or not found.renew(head, token_ids, source):
            found = self._rows[head] = _Rows(head, token_ids, source)
        return found


def _trace(tensor: torch.Tensor | None) -> tuple | None:
    """What changes where a tensor is moved or written to, short of writing past autograd."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.device, tensor.dtype, 0 if tensor.is_inference() else tensor._version
