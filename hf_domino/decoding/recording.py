"""Record the proposals of every round, on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hf_domino._common.blocks import Setting
from hf_domino.decoding.tree import Tree

_recorded = Setting[list[Tree] | None]("recorded", default=None)


@contextmanager
def recorded_proposals() -> Iterator[list[Tree]]:
    """Record the proposals of every round of every assisted generation inside the `with` block, on the CPU."""
    record: list[Tree] = []
    with _recorded.within(record):
        yield record


def open_record() -> list[Tree] | None:
    """Return the list to which rounds add copies of their proposals; None if nobody wants them."""
    return _recorded.get()


def copied(proposals: Tree) -> Tree:
    """Return a copy on the CPU, because later rounds may write to the same memory."""
    parents = proposals.parents
    if parents is not None:
        parents = parents.clone().cpu()
    return Tree(proposals.tokens.clone().cpu(), parents)
