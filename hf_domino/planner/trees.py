"""Trees beside chains: what their nodes are worth, and what it costs to verify so many at once.

A round accepts a node where it accepts its parent and the node is right, and siblings are never right together. So a
tree brings 1 + the sum of its nodes' chances, as a chain brings 1 + the sum of its survival. In order of their chances
nodes stand in for `survival`: `expected_tokens`, `speed_ups` and `best_length` say of nodes what they say of proposals.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise


def tree_chances(shares: Sequence[Sequence[float]], num_nodes: int) -> list[float]:
    """Return the chances of the likeliest nodes, each with all before it on its path: the best tree of every size.

    Args:
        shares (`Sequence[Sequence[float]]`): For each depth, how often the likeliest candidate, the second one and so
            on is right if all before are; with one candidate a depth the tree is a chain.
        num_nodes (`int`): Most nodes; fewer are returned where there are not so many.

    Returns:
        `list[float]`: The likeliest first. Of equals the parent stands before its children.

    Raises:
        ValueError: If the shares of a depth are negative, rise, or sum to more than 1.

    Example:
    ```python
    >>> from hf_domino.planner import expected_tokens, tree_chances
    >>> tree_chances([[0.5, 0.25], [0.5, 0.25]], num_nodes=4), expected_tokens(tree_chances([[0.5]] * 3, num_nodes=3))
    ([0.5, 0.25, 0.25, 0.125], 1.875)

    ```
    """
    for depth, ranks in enumerate(shares):
        if min(ranks, default=0) < 0 or math.fsum(ranks) > 1 + 1e-9 or any(a < b for a, b in pairwise(ranks)):
            raise ValueError(
                f"shares must be 0 or more, sum to 1 at most and not rise, got {list(ranks)} at depth {depth}: give "
                "how often each rank of candidates is right."
            )
    chances: list[float] = []
    nodes = [(-1.0, -1)]  # less the chance, and depth; the anchor
    while nodes and len(chances) <= num_nodes:
        chance, depth = heapq.heappop(nodes)
        chances.append(-chance)
        ranks = shares[depth + 1] if depth + 1 < len(shares) else ()
        for share in ranks:
            heapq.heappush(nodes, (chance * share, depth + 1))
    return chances[1:]


def costs_by_width(seconds: Mapping[int, float], num_nodes: int, drafting: float = 0.0) -> list[float]:
    """Return the seconds of a round with 0, 1, ... nodes, as `best_length` takes them, from a few measured widths.

    Args:
        seconds (`Mapping[int, float]`): Of a verification by its positions, the anchor's among them; 1 is plain
            decoding. What lies between two is on their line.
        num_nodes (`int`): Most nodes.
        drafting (`float`, *optional*, defaults to 0.0): Of the drafter, a round: to grow a tree takes a step a depth,
            whatever its width.

    Raises:
        ValueError: If 1 was not measured, or nothing as wide as `num_nodes + 1` positions.

    Example:
    ```python
    >>> from hf_domino.planner import best_length, costs_by_width, tree_chances
    >>> costs = costs_by_width({1: 27, 9: 31, 17: 35}, num_nodes=16, drafting=5)
    >>> costs[0], costs[2], best_length(tree_chances([[0.5, 0.2, 0.1]] * 6, num_nodes=16), costs)
    (27, 33.0, 14)

    ```
    """
    widths = sorted(seconds)
    if not widths or widths[0] != 1 or widths[-1] <= num_nodes:
        raise ValueError(
            f"seconds must have times of 1 and of {num_nodes + 1} or more positions, got {widths}: measure these, too."
        )
    costs = [seconds[1]]
    for low, high in pairwise(widths):
        slope = (seconds[high] - seconds[low]) / (high - low)
        costs += [drafting + seconds[low] + slope * (width - low) for width in range(low + 1, high + 1)]
    return costs[: num_nodes + 1]
