"""Grouped-query attention on a CPU, for forwards of a few positions after a long cache.

If there is a mask, Transformers' `sdpa` repeats keys and values for every query head of a group, which copies the whole
cache in each layer. Inside [`unrepeated_keys`], the query heads of a group become rows of their common key head
instead. Transformers does the same for a plain decode step.

Shapes: B batch, H query heads, A key heads, G query heads of a key head, Q queries, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_domino._common.blocks import Patch, Setting

NAME = "sdpa"  # of the function in Transformers' registry, which the whole process shares
_ADDED_TO_SCORES = "position_bias", "softcap"  # options that only Transformers' function handles

_is_wanted = Setting("unrepeated_keys", default=False)  # by this thread


@contextmanager
def unrepeated_keys(device: torch.device) -> Iterator[None]:
    """Run the calling thread's `sdpa` attention without repeated keys inside the `with` block.

    Other threads keep Transformers' function, and an `sdpa` that other code has registered stays in place.

    Args:
        device (`torch.device`): Device of the model; unless it is a CPU, nothing changes.
    """
    if device.type != "cpu":
        yield
        return
    with _patch.applied(), _is_wanted.within(True):
        yield


def _replace_attention() -> None:
    if ALL_ATTENTION_FUNCTIONS[NAME] is sdpa_attention_forward:
        ALL_ATTENTION_FUNCTIONS[NAME] = _attend


def _restore_attention() -> None:
    if ALL_ATTENTION_FUNCTIONS[NAME] is _attend:
        del ALL_ATTENTION_FUNCTIONS[NAME]  # which uncovers Transformers' own function


_patch = Patch(_replace_attention, _restore_attention)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `[B, H, Q, D]` to `[B, A, S, D]`, and return `[B, Q, H, D]`, like Transformers' function."""
    num_groups = getattr(module, "num_key_value_groups", 1)
    is_special = dropout or any(options.get(name) is not None for name in _ADDED_TO_SCORES)
    # A compiled model only calls this while it is traced, and the trace then serves all threads.
    is_wanted = not torch.compiler.is_compiling() and _is_wanted.get() and query.is_cpu
    if not is_wanted or num_groups == 1 or is_special or not _is_shared(attention_mask, query.shape[2]):
        options = options | {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert attention_mask is not None
    batch_size, num_heads, num_queries, width = query.shape
    attended = F.scaled_dot_product_attention(
        query.reshape(batch_size, num_heads // num_groups, num_groups * num_queries, width),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, num_groups, 1),
        scale=scaling,
    )
    attended = attended.reshape(batch_size, num_heads, num_queries, value.shape[3])
    return attended.transpose(1, 2).contiguous(), None


def _is_shared(mask: torch.Tensor | None, num_queries: int) -> bool:
    """Return whether there is a mask that is the same for all heads: `[B, 1, Q, S]`."""
    return mask is not None and mask.dim() == 4 and mask.shape[1:3] == (1, num_queries)
