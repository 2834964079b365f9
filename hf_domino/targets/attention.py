"""Attention on a CPU whose result for a position has the same bits in every forward that contains the position.

Torch's kernels add up in an order that depends on how many queries a call has, and on where masked keys are. So a block
and plain decode steps would round differently. Inside [`rowwise_attention`], a query's result depends on its own keys
only: not on the other queries, on padding, or on the other branches of a tree. This takes about as long as torch's
kernel, which repeats keys and values for grouped heads, and less for a plain decode step in bfloat16.

How matrix products add up was measured, see [`adds_up_evenly`]: with at least `LEAST_QUERIES` rows and `LEAST_KEYS`
columns, each element of a product is the same whatever the other rows and columns are. Up to 192 terms are added one
after the other, so terms that are zero change nothing; more terms are grouped, depending on how many there are. So the
values of a query are divided at a multiple of `PANEL` that depends on their number alone, and two products are added.

Shapes: B batch, H query heads, A key heads, G query heads of a key head, Q queries, R queries with the same first key,
S keys, C keys that some of them see, D head width, T columns in which a tree's paths differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_domino._common.blocks import Patch, Setting

NAME = "sdpa"  # of the function in Transformers' registry, which the whole process shares
_ADDED_TO_SCORES = "position_bias", "softcap"  # options that only Transformers' function handles

MOST_QUERIES = 64  # forwards over more positions are prompts, for which torch's kernel is faster
LEAST_QUERIES = 4
LEAST_KEYS = 64
PANEL = 64
HIDDEN = torch.finfo(torch.float32).min  # not infinite, because a query of padding may see no key


@dataclass(frozen=True)
class _Part:
    """Queries of one sequence that have the same first key."""

    sequence: slice
    queries: list[int] | slice
    keys: slice
    divisions: list[tuple[list[int] | slice, int]]  # queries among these, and how many values their first product has
    hidden: torch.Tensor | None = None  # [R, 1, T] boolean, of the last T keys; None if all queries see all keys
    order: torch.Tensor | None = None  # [R, 1, T], for a tree: the last T keys, beginning with those that a query sees


class _Parts:
    """The parts of the last masks, because many layers share a mask."""

    def __init__(self) -> None:
        self._last: list[tuple[torch.Tensor, list[_Part] | None]] = []

    def of(self, mask: torch.Tensor) -> list[_Part] | None:
        """The parts of a mask `[B, 1, Q, S]`; None if it does more than hide keys."""
        for seen, parts in self._last:
            if seen is mask:
                return parts
        parts = _divide(mask)
        self._last = [(mask, parts), *self._last[:1]]
        return parts


_parts = Setting[_Parts | None]("rowwise_attention", default=None)  # by this thread


@contextmanager
def rowwise_attention(device: torch.device) -> Iterator[None]:
    """Run the calling thread's `sdpa` attention inside the `with` block so that it computes each position alone.

    Other threads keep Transformers' function, and an `sdpa` that other code has registered stays in place.

    Args:
        device (`torch.device`): Device of the model; unless it is a CPU, nothing changes.
    """
    if device.type != "cpu":
        yield
        return
    with _patch.applied(), _parts.within(_Parts()):
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
    parts = None
    is_special = dropout or any(options.get(name) is not None for name in _ADDED_TO_SCORES)
    if not is_special and _is_wanted(query):
        parts = _parts_of(query, key, attention_mask)
    if parts is None:
        options = options | {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    precision = torch.float64 if query.dtype is torch.float64 else torch.float32
    rows = query.transpose(1, 2).to(precision) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return _attend_by(parts, rows, key, value).to(query.dtype), None


def _attend_by(parts: list[_Part], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend part by part, from `[B, Q, H, D]` to `[B, A, S, D]`; the result is `[B, Q, H, D]`."""
    if len(parts) == 1:
        return _attend_part(parts[0], query, key[:, :, parts[0].keys], value[:, :, parts[0].keys])
    attended = query.new_empty(*query.shape[:3], value.shape[3])
    for part in parts:
        keys = key[part.sequence, :, part.keys]
        values = value[part.sequence, :, part.keys]
        attended[part.sequence, part.queries] = _attend_part(part, query[part.sequence, part.queries], keys, values)
    return attended


def _is_wanted(query: torch.Tensor) -> bool:
    # A compiled model only calls this while it is traced, and the trace then serves all threads.
    if torch.compiler.is_compiling() or not query.is_cpu or _parts.get() is None:
        return False
    # A `TorchDispatchMode`, such as one that counts FLOPs or records a stage, sees Transformers' own attention.
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or is_in_torch_dispatch_mode())


def _parts_of(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> list[_Part] | None:
    """Return how to divide the call; None to leave it to Transformers."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if mask is None:  # queries of a prompt, or the only query of each sequence, which sees all keys
        if num_queries > 1:
            return None
        return [_part_alone(num_keys)]
    is_shared = mask.dim() == 4 and mask.shape[1:] == (1, num_queries, num_keys)
    known = _parts.get()
    if not is_shared or num_queries > MOST_QUERIES or len(mask) != len(query) or known is None:
        return None
    return known.of(mask)


def _part_alone(num_keys: int) -> _Part:
    """Return the part of the only query of each sequence, which sees all keys."""
    everything = slice(None)
    return _Part(everything, everything, everything, [(everything, _division(num_keys))])


def _division(num_keys: int) -> int:
    """Return how many values the first product of a query has, and leave at least `LEAST_KEYS` for the second."""
    return PANEL * max(0, (num_keys - LEAST_KEYS) // PANEL)


def _divide(mask: torch.Tensor) -> list[_Part] | None:
    """Return the parts of a mask `[B, 1, Q, S]`; None if it does more than hide keys, or hides all from a sequence."""
    seen = mask[:, 0]
    if seen.dtype is not torch.bool:
        seen = seen == 0
        if bool((mask[:, 0].masked_fill(seen, HIDDEN) > torch.finfo(mask.dtype).min / 2).any()):
            return None
    if not bool(seen[:, -1].any(dim=1).all()):  # a sequence of padding alone, of which kernels make different things
        return None
    firsts = seen.int().argmax(dim=2).tolist()
    parts = []
    for index, of_sequence in enumerate(firsts):
        for first in sorted(set(of_sequence)):
            queries = [place for place, found in enumerate(of_sequence) if found == first]
            parts.append(_part(index, seen[index], queries, first))
    return parts


def _part(index: int, seen: torch.Tensor, queries: list[int], first: int) -> _Part:
    """Make a part of the sequence at an index, from what all of its queries see, `[Q, S]`."""
    rows = slice(None) if len(queries) == len(seen) else queries
    seen = seen[rows, first:]
    end = int(seen.any(dim=0).int().cumsum(dim=0).argmax()) + 1  # behind the last key that a query sees
    seen = seen[:, :end]
    numbers = seen.sum(dim=1, keepdim=True)
    start = int(seen.all(dim=0).int().cumprod(dim=0).sum())  # all queries see the keys before it
    is_chain = torch.equal(seen, torch.arange(end, device=seen.device) < numbers)
    hidden = None if start == end else ~seen[:, None, start:]
    order = None if hidden is None or is_chain else hidden.to(torch.uint8).argsort(dim=2, stable=True)
    divided: dict[int, list[int]] = {}
    for place, number in enumerate(numbers.flatten().tolist()):
        divided.setdefault(_division(number), []).append(place)
    divisions: list[tuple[list[int] | slice, int]] = []
    for division, places in divided.items():
        is_range = places[-1] - places[0] == len(places) - 1  # a slice copies nothing
        divisions.append((slice(places[0], places[-1] + 1) if is_range else places, division))
    return _Part(slice(index, index + 1), rows, slice(first, first + end), divisions, hidden, order)


def _attend_part(part: _Part, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend from `[B, R, H, D]` to `[B, A, C, D]`; the result is `[B, R, H, D]`."""
    num_heads, num_keys = key.shape[1:3]
    groups = query.unflatten(2, (num_heads, -1)).transpose(1, 2)  # [B, A, R, G, D]
    rows = groups.flatten(2, 3).flatten(0, 1)  # [B * A, R * G, D]
    num_rows = rows.shape[1]
    keys = key.flatten(0, 1).to(query.dtype)
    values = value.flatten(0, 1).to(query.dtype)
    if num_rows < LEAST_QUERIES:
        rows = F.pad(rows, (0, 0, 0, LEAST_QUERIES - num_rows))
    if num_keys < LEAST_KEYS:
        keys = F.pad(keys, (0, 0, 0, LEAST_KEYS - num_keys))
        values = F.pad(values, (0, 0, 0, LEAST_KEYS - num_keys))
    scores = torch.bmm(rows, keys.transpose(1, 2))
    if num_keys < LEAST_KEYS:
        scores[:, :, num_keys:] = HIDDEN
    if part.hidden is not None:
        _last(scores, part.hidden, groups.shape[3], num_keys).masked_fill_(part.hidden, HIDDEN)
    if part.order is None:
        chances = scores.softmax(dim=2)
    else:
        # The sum adds up in the order of each query's own path, as if no other keys were between them.
        differing = _last(scores, part.order, groups.shape[3], num_keys)
        places = part.order.expand(differing.shape)
        differing.copy_(differing.gather(3, places))
        chances = scores.softmax(dim=2)
        differing = _last(chances, part.order, groups.shape[3], num_keys)
        differing.copy_(torch.empty_like(differing).scatter_(3, places, differing))
    if len(part.divisions) == 1:
        attended = _products(chances, values, part.divisions[0][1])[:, :num_rows]
    else:
        attended = rows.new_empty(len(rows), num_rows, values.shape[2])
        for chosen, division in part.divisions:
            of_queries = attended.unflatten(1, groups.shape[2:4])
            found = _products(
                chances[:, :num_rows].unflatten(1, groups.shape[2:4])[:, chosen].flatten(1, 2), values, division
            )
            of_queries[:, chosen] = found.unflatten(1, (-1, groups.shape[3]))
    return attended.view(*groups.shape[:4], -1).transpose(1, 2).flatten(2, 3)


def _last(scores: torch.Tensor, of_queries: torch.Tensor, num_groups: int, num_keys: int) -> torch.Tensor:
    """Return those of scores `[B * A, R * G, C]`, or more, that a tensor `[R, 1, T]` belongs to: `[B * A, R, G, T]`."""
    num_queries, _, num_last = of_queries.shape
    rows = scores[:, : num_queries * num_groups, num_keys - num_last : num_keys]
    return rows.unflatten(1, (num_queries, num_groups))


def _products(chances: torch.Tensor, values: torch.Tensor, division: int) -> torch.Tensor:
    """Multiply `[B * A, R, C]` with `[B * A, C, D]`."""
    num_rows = chances.shape[1]
    if num_rows < LEAST_QUERIES:
        chances = F.pad(chances, (0, 0, 0, LEAST_QUERIES - num_rows))
    attended = torch.bmm(chances[:, :, division:], values[:, division:])
    if division:
        attended.baddbmm_(chances[:, :, :division], values[:, :division])
    return attended[:, :num_rows]


@cache
def adds_up_evenly(width: int, num_threads: int) -> bool:
    """Whether a query's result has the same bits in every call, which is tried once for a head width.

    Args:
        width (`int`): Head width.
        num_threads (`int`): Number of threads of torch.
    """
    generator = torch.Generator().manual_seed(0)
    num_queries = 24
    for num_prefix in (5, 60, 150, 310, 570):
        num_keys = num_prefix + num_queries
        query = torch.randn(1, num_queries, 6, width, generator=generator)
        key = torch.randn(1, 2, num_keys, width, generator=generator)
        value = torch.randn(1, 2, num_keys, width, generator=generator)
        parents = [(place - 1) * 2 // 3 for place in range(num_queries)]
        seen = torch.zeros(num_queries, num_keys, dtype=torch.bool)
        for place, parent in enumerate(parents):
            if place:
                seen[place] = seen[parent]
            else:
                seen[place, :num_prefix] = True
            seen[place, num_prefix + place] = True
        chain = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_prefix)
        for mask in (chain, seen):
            parts = _divide(mask[None, None]) or []
            found = _attend_by(parts, query, key, value)
            for place in range(num_queries):
                own = key[:, :, mask[place]], value[:, :, mask[place]]
                part = _part_alone(own[0].shape[2])
                alone = _attend_by([part], query[:, place : place + 1], *own)
                if not torch.equal(alone, found[:, place : place + 1]):
                    return False
    return True
