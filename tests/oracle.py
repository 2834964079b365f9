"""A drafter that knows the future: random drafters accept almost nothing, and rollback must be tested.

What tests know of how rounds propose stands here alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.tree import Tree


@contextlib.contextmanager
def _replaced(name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Calls inside the block draft by `replacement(original, session, prefixes, most, ...)`."""
    original = getattr(DraftSession, name)

    def call(self, prefixes, most=None, *args, **kwargs):
        return replacement(partial(original, self), self, prefixes, most, *args, **kwargs)

    setattr(DraftSession, name, call)
    try:
        yield
    finally:
        setattr(DraftSession, name, original)


@contextlib.contextmanager
def proposed() -> Iterator[list[tuple[int, list[int], list[int]]]]:
    """Yield what the drafter proposes inside the block: row, ids so far and proposals of every round of every row."""
    found: list[tuple[int, list[int], list[int]]] = []

    def record(propose, session, prefixes, *args, **kwargs):
        proposals = propose(prefixes, *args, **kwargs)
        for index, (row, length) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            found.append((row, prefixes.ids[index, :length].tolist(), proposals[index].tolist()))
        return proposals

    with _replaced("propose", record):
        yield found


@contextlib.contextmanager
def at_most(lengths: Iterator[int]) -> Iterator[None]:
    """Let the rounds inside the block propose no more than these numbers of tokens."""

    def shorten(propose, session, prefixes, most, *args, **kwargs):
        return propose(prefixes, min(next(lengths), most), *args, **kwargs)

    with _replaced("propose", shorten):
        yield


@contextlib.contextmanager
def oracle(
    target: PreTrainedModel,
    prompt: torch.Tensor,
    accuracy: float,
    truth: torch.Tensor | None = None,
    **generate_kwargs,
) -> Iterator[None]:
    """Swap each greedily drafted token for the target's own continuation with probability `accuracy`.

    Args:
        target (`PreTrainedModel`): The target, whose plain greedy text is the truth.
        prompt (`torch.Tensor`): Prompt of the calls inside the block, `[batch, length]`.
        accuracy (`float`): Probability that a drafted token is replaced, in `[0, 1]`.
        truth (`torch.Tensor`, *optional*): That greedy text, `[batch, length]`, where the test has it already.
        generate_kwargs: What the calls inside pass to `generate`; without an end-of-text token.
    """
    if accuracy == 0.0:  # the drafter's own drafts
        yield
        return
    if truth is None:
        plain = {"eos_token_id": -1} | generate_kwargs | {"return_dict_in_generate": False}
        truth = target.generate(prompt, **plain)
    rows, draws = truth.tolist(), random.Random(0)

    def propose_truth(propose, session, prefixes, *args, **kwargs):
        proposals = propose(prefixes, *args, **kwargs)
        for index, (row, start) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            for k in range(proposals.shape[1]):
                if start + k < len(rows[row]) and draws.random() < accuracy:
                    proposals[index, k] = rows[row][start + k]
        return proposals

    with _replaced("propose", propose_truth):
        yield


@contextlib.contextmanager
def faults(truth: list[list[int]], vocab_size: int) -> Iterator[None]:
    """Propose the target's own continuation up to one fault, whose place moves on every round: all lengths occur.

    Args:
        truth (`list[list[int]]`): Prompt and text of each row, as the target alone writes it.
        vocab_size (`int`): To make a wrong token of a right one.
    """
    rounds = [0] * len(truth)

    def propose_faulty(propose, session, prefixes, *args, **kwargs):
        proposals = propose(prefixes, *args, **kwargs)
        count = proposals.shape[1]
        for index, (row, start) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            fault = (row - rounds[row]) % (session.drafter.config.num_draft_tokens + 1)
            rounds[row] += 1
            right = torch.tensor(truth[row][start : start + min(count, fault + 1)])
            proposals[index, : len(right)] = right
            if fault < len(right):
                proposals[index, fault] = (right[fault] + 1) % vocab_size
        return proposals

    with _replaced("propose", propose_faulty):
        yield


@contextlib.contextmanager
def tree_faults(truth: list[list[int]], vocab_size: int, most_nodes: int) -> Iterator[None]:
    """Propose trees in which the target's own continuation stands among wrong branches, up to a fault that moves.

    Args:
        truth (`list[list[int]]`): Prompt and text of each row, as the target alone writes it.
        vocab_size (`int`): To take wrong tokens from.
        most_nodes (`int`): Of one tree.
    """
    draws, rounds = random.Random(0), [0] * len(truth)

    def grow_faulty(grow, session, prefixes, most, *args, **kwargs):
        grow(prefixes, most, *args, **kwargs)  # what the session keeps between rounds
        trees = []
        for row, start in zip(prefixes.rows, prefixes.lengths, strict=True):
            fault = (rounds[row] + row) % (most + 1)
            rounds[row] += 1
            right = truth[row][start : start + fault]
            wrong = truth[row][start + len(right)] if start + len(right) < len(truth[row]) else None
            trees.append(_faulty_tree(draws, right, wrong, most, max(most_nodes, most), vocab_size))
        tokens, parents = torch.tensor(trees).unbind(dim=1)
        return Tree(tokens, parents, most)

    with _replaced("grow", grow_faulty):
        yield


def _faulty_tree(
    draws: random.Random, right: list[int], wrong: int | None, most: int, num_nodes: int, vocab_size: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of so many nodes, `most` deep, some of them the right ones in order."""
    right, tokens, parents, depths, end = list(right), list[int](), list[int](), [0], 0
    while len(tokens) < num_nodes:
        if right and (draws.random() < 0.4 or len(tokens) >= num_nodes - len(right)):
            parent, token = end, right.pop(0)
            end = len(tokens) + 1
        else:
            parent, token = draws.randrange(len(depths)), draws.randrange(vocab_size)
            is_right = parent == end and token in (wrong, *right[:1])
            siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if is_right or token in siblings or depths[parent] == most:
                continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tokens, parents
