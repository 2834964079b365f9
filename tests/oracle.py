"""A drafter that knows the future: random drafters accept almost nothing, and rollback must be tested.

What tests know of how rounds propose stands here alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.tree import Tree


@contextlib.contextmanager
def _replaced(replacement: Callable[..., Any], is_tree: bool = False) -> Iterator[None]:
    """Chains, or trees, of calls inside the block are `replacement(original, session, prefixes, most, ...)`."""
    original = DraftSession.propose

    def call(self, prefixes, most, noise=None, num_nodes=None, *args):
        if (num_nodes is not None) != is_tree:
            return original(self, prefixes, most, noise, num_nodes, *args)

        def tokens_or_tree(prefixes, most):
            tree = original(self, prefixes, most, noise, num_nodes, *args)
            return tree if is_tree else tree.tokens

        found = replacement(tokens_or_tree, self, prefixes, most)
        return found if is_tree else Tree(found)

    DraftSession.propose = call
    try:
        yield
    finally:
        DraftSession.propose = original


@contextlib.contextmanager
def proposed() -> Iterator[list[tuple[int, list[int], list[int]]]]:
    """Yield what the drafter proposes inside the block: row, ids so far and proposals of every round of every row."""
    found: list[tuple[int, list[int], list[int]]] = []

    def record(propose, session, prefixes, most):
        proposals = propose(prefixes, most)
        for index, (row, length) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            found.append((row, prefixes.ids[index, :length].tolist(), proposals[index].tolist()))
        return proposals

    with _replaced(record):
        yield found


@contextlib.contextmanager
def at_most(lengths: Iterator[int]) -> Iterator[None]:
    """Let the rounds inside the block propose no more than these numbers of tokens."""

    def shorten(propose, session, prefixes, most):
        return propose(prefixes, min(next(lengths), most))

    with _replaced(shorten):
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

    def propose_truth(propose, session, prefixes, most):
        proposals = propose(prefixes, most)
        for index, (row, start) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            for k in range(proposals.shape[1]):
                if start + k < len(rows[row]) and draws.random() < accuracy:
                    proposals[index, k] = rows[row][start + k]
        return proposals

    with _replaced(propose_truth):
        yield


@contextlib.contextmanager
def faults(truth: list[list[int]], vocab_size: int) -> Iterator[None]:
    """Propose the target's own continuation up to one fault, whose place moves on every round: all lengths occur.

    Args:
        truth (`list[list[int]]`): Prompt and text of each row, as the target alone writes it.
        vocab_size (`int`): To make a wrong token of a right one.
    """
    rounds = [0] * len(truth)

    def propose_faulty(propose, session, prefixes, most):
        proposals = propose(prefixes, most)
        count = proposals.shape[1]
        for index, (row, start) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            fault = (row - rounds[row]) % (session.drafter.config.num_draft_tokens + 1)
            rounds[row] += 1
            right = torch.tensor(truth[row][start : start + min(count, fault + 1)])
            proposals[index, : len(right)] = right
            if fault < len(right):
                proposals[index, fault] = (right[fault] + 1) % vocab_size
        return proposals

    with _replaced(propose_faulty):
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

    def grow_faulty(grow, session, prefixes, most):
        grow(prefixes, most)  # what the session keeps between rounds
        trees = []
        for row, start in zip(prefixes.rows, prefixes.lengths, strict=True):
            fault = (rounds[row] + row) % (most + 1)
            rounds[row] += 1
            right = truth[row][start : start + fault]
            wrong = truth[row][start + len(right)] if start + len(right) < len(truth[row]) else None
            trees.append(_faulty_tree(draws, right, wrong, most, max(most_nodes, most), vocab_size))
        tokens, parents = torch.tensor(trees).unbind(dim=1)
        return Tree(tokens, parents, most)

    with _replaced(grow_faulty, is_tree=True):
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
