"""Conversations: what the drafter knows of a prefix travels with the target's cache from one `generate` to the next.

`generate(..., return_dict_in_generate=True)` returns the cache, and a later call takes it. The target does not
run over the cached prefix again, so the drafter could not see it; its context is kept on the cache object instead. A
prefix it has not seen costs acceptance, never exactness.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.context import ContextCache

_ATTRIBUTE = "_hf_domino_context"


@dataclass
class KeptContext:
    """One drafter's context of one sequence.

    Args:
        drafter (`weakref.ref`): Whose context it is.
        context ([`ContextCache`]): Keys and values of the positions it has seen.
        length (`int`): Positions of the target's cache when it was kept.
        has_gap (`bool`): Whether the drafter has missed some of them.
        mark (`torch.Tensor`, *optional*): The target's last cached key, to notice that the cache was rewritten.
    """

    drafter: weakref.ref
    context: ContextCache
    length: int
    has_gap: bool
    mark: torch.Tensor | None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptContext:
        """Copy the tensors, for a cache that serves several continuations; the drafter is not copied."""
        return KeptContext(self.drafter, copy.deepcopy(self.context, memo), self.length, self.has_gap, self.mark)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave a saved cache without it."""
        return (type(None), ())


def keep_context(cache: Any, drafter: DominoDraftModel, context: ContextCache, has_gap: bool) -> None:
    """Leave the drafter's context on the target's cache of a single sequence."""
    length = cache.get_seq_length()
    kept = KeptContext(weakref.ref(drafter), context, length, has_gap, _last_key(cache, length))
    setattr(cache, _ATTRIBUTE, kept)


def kept_context(cache: Any, drafter: DominoDraftModel, batch_size: int = 1) -> tuple[ContextCache | None, bool]:
    """Take the drafter's context back from the target's cache.

    Args:
        cache (`Cache`): The target's, as it was left or cropped since.
        drafter ([`DominoDraftModel`]): Who asks.
        batch_size (`int`, *optional*, defaults to 1): Sequences to go on with; contexts are kept of single ones.

    Returns:
        `tuple`: The context, or None if there is none that fits; and whether the drafter has missed part of the prefix.
    """
    kept, length = getattr(cache, _ATTRIBUTE, None), cache.get_seq_length()
    if kept is not None:
        delattr(cache, _ATTRIBUTE)
    if kept is None or batch_size > 1 or kept.drafter() is not drafter:
        return None, length > 0
    if not kept.context.can_grow(drafter.dtype, drafter.device):  # the drafter has been moved or cast since
        return None, length > 0
    cropped = max(kept.length - length, 0)
    if cropped and (kept.has_gap or cropped > kept.context.lengths[0]):
        return None, length > 0
    mark = None if cropped else _last_key(cache, kept.length)
    if mark is not None and kept.mark is not None and not torch.equal(mark, kept.mark):
        return None, length > 0
    kept.context.truncate(kept.context.lengths[0] - cropped)
    if length > kept.length:
        kept.context.leave_gap()
    return kept.context, kept.has_gap or length > kept.length


def _last_key(cache: Any, length: int) -> torch.Tensor | None:
    """Key of position `length - 1` in the first layer that keeps all positions, `[A, D]`."""
    for layer in cache.layers:
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.dim() == 4 and not getattr(layer, "is_sliding", False) and keys.shape[2] >= length:
            return keys[0, :, length - 1].clone()
    return None
