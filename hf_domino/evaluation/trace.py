"""Trace one assisted call: who proposed each token, and which proposals the target did not accept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_domino.decoding.recording import recorded_proposals
from hf_domino.decoding.tree import Tree
from hf_domino.pair import Pair
from hf_domino.stats.decoding_stats import DecodingStats
from hf_domino.stats.phases import timed_phases

DRAFTER, RECYCLING, LOOKUP, TARGET = "drafter", "recycling", "lookup", "target"


@dataclass(frozen=True)
class TracedRound:
    """One forward of the target, and the tokens that it emitted.

    Args:
        proposer (`str`): Who proposed tokens: `"drafter"`, `"recycling"` or `"lookup"`; `"target"` if nobody did, as in
            a plain decode step and when the prompt was read.
        tokens (`list[int]`): The emitted tokens. The first `num_accepted` were proposed; the one after them, if there
            is one, is the target's own.
        num_accepted (`int`): Number of accepted proposals.
        left_over (`list[int]`): Proposals that are not part of the text: the target chose other tokens, or the text
            ended before.
    """

    proposer: str
    tokens: list[int]
    num_accepted: int = 0
    left_over: Sequence[int] = ()

    @property
    def num_proposed(self) -> int:
        """Number of proposals, counting all nodes of a tree."""
        return self.num_accepted + len(self.left_over)

    @property
    def writers(self) -> list[str]:
        """Who wrote each of the tokens."""
        own = len(self.tokens) - self.num_accepted
        return [self.proposer] * self.num_accepted + [TARGET] * own


@dataclass(frozen=True)
class Trace:
    """One call: its rounds, the first of which read the prompt, and its statistics with the time of each phase."""

    rounds: list[TracedRound]
    stats: DecodingStats

    def count(self, writer: str) -> int:
        """Return how many tokens a writer wrote."""
        return sum(each.writers.count(writer) for each in self.rounds)


def trace(pair: Pair, inputs: Any, arguments: dict[str, Any], seed: int = 0) -> Trace:
    """Generate once with the pair's drafter, and trace the call.

    Args:
        pair ([`Pair`]): The target with its drafter.
        inputs (`dict`): Token ids `[1, T]` and attention mask of one prompt.
        arguments (`dict`): Other arguments of `generate`.
        seed (`int`, *optional*, defaults to 0): Random seed for sampling.

    Example:
    ```python
    >>> from hf_domino.evaluation.trace import TracedRound
    >>> TracedRound("drafter", [5, 9, 33], num_accepted=2, left_over=[7]).writers
    ['drafter', 'drafter', 'target']

    ```
    """
    torch.manual_seed(seed)
    with recorded_proposals() as proposals, timed_phases():
        output = pair.target.generate(**inputs, **arguments, assistant_model=pair.drafter)
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    stats = pair.drafter.stats
    method = RECYCLING if pair.drafter.config.learns_while_drafting else DRAFTER
    rounds = [TracedRound(TARGET, tokens[:1])]
    start = 1
    for tree, length, is_lookup in zip(proposals, stats.rows[0], stats.looked_up[0], strict=True):
        emitted = tokens[start : start + length]
        rounds.append(_traced(tree, emitted, LOOKUP if is_lookup else method))
        start += length
    return Trace(rounds, stats)


def _traced(tree: Tree, tokens: list[int], proposer: str) -> TracedRound:
    """Find the emitted tokens among the proposals of their round."""
    branches = tree.branches()
    path = [0]
    for token in tokens:
        position = branches.get((path[-1], token))
        if position is None:
            break
        path.append(position)
    left_over = [token for place, token in enumerate(tree.tokens[0].tolist(), start=1) if place not in path]
    if not tree.num_nodes:
        proposer = TARGET
    return TracedRound(proposer, tokens, len(path) - 1, left_over)
