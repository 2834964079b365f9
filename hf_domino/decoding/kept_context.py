"""The drafter's context between calls, kept on the target's cache that the first call returned.

`generate(..., return_dict_in_generate=True)` returns the cache, which a later call can continue from. The target does
not process the cached prefix again, so the drafter would get no hidden states of it. For this reason, the drafter's
context is kept on the cache object. If the drafter has missed a part of the prefix, fewer drafts are accepted, but the
output stays exact.

Shapes: A heads, D head width.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache

_ATTRIBUTE = "_hf_domino_context"


@dataclass
class KeptContext:
    """The context of one drafter for one sequence."""

    drafter: weakref.ref
    context: ContextCache  # keys and values of the positions that the drafter has seen
    length: int  # length of the target's cache when the context was kept
    has_gap: bool  # whether the drafter has missed some of its positions
    mark: torch.Tensor | None  # the target's last cached key, which reveals whether the cache was rewritten since

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptContext:
        """Copy the tensors but not the drafter, so that a copied cache can continue on its own."""
        return KeptContext(self.drafter, copy.deepcopy(self.context, memo), self.length, self.has_gap, self.mark)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None when the cache is pickled, so that the context is not saved with it."""
        return (type(None), ())


def keep_context(cache: Any, drafter: DominoDraftModel, context: ContextCache, has_gap: bool) -> None:
    """Attach the drafter's context to the target's cache of a single sequence."""
    length = cache.get_seq_length()
    kept = KeptContext(weakref.ref(drafter), context, length, has_gap, _last_key(cache, length))
    setattr(cache, _ATTRIBUTE, kept)


def kept_context(cache: Any, drafter: DominoDraftModel, batch_size: int = 1) -> tuple[ContextCache | None, bool]:
    """Take the drafter's context back from the target's cache, and say whether it has missed part of the prefix."""
    # The caller may have cropped the cache since. A context is only kept for a single sequence.
    kept = getattr(cache, _ATTRIBUTE, None)
    length = cache.get_seq_length()
    if kept is None:
        return None, length > 0
    delattr(cache, _ATTRIBUTE)
    cropped = max(kept.length - length, 0)
    is_own = batch_size == 1 and kept.drafter() is drafter
    # The context cannot be continued if the drafter was moved to another device or cast to another dtype since.
    if not (is_own and kept.context.can_grow(drafter.dtype, drafter.device)):
        return None, length > 0
    if cropped and (kept.has_gap or cropped > kept.context.lengths[0]):
        return None, length > 0
    mark = None if cropped else _last_key(cache, kept.length)
    if mark is not None and kept.mark is not None and not torch.equal(mark, kept.mark):
        return None, length > 0
    kept.context.crop([kept.context.lengths[0] - cropped])
    if length > kept.length:
        kept.context.mark_gap()
    return kept.context, kept.has_gap or length > kept.length


def _last_key(cache: Any, length: int) -> torch.Tensor | None:
    """The key of position `length - 1` in the first layer that keeps all positions, `[A, D]`; None without one."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and not getattr(layer, "is_sliding", False) and keys.shape[2] >= length:
            return keys[0, :, length - 1].clone()
    return None
