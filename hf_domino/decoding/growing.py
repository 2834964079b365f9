"""Growing trees: the most likely branches below the anchors, depth by depth.

At each depth, every sequence has up to L branches, which are the nodes that can get children. The chance of a child is
its own chance times that of its branch, and the children of all branches of a sequence are ranked together. The tree
consists of the N best nodes of all depths. Because no child is more likely than its parent, this is a best-first
search, except for ties and for nodes that would need more than L branches.

If the target samples, the target and the drafts share the exponential noise E of a step, and the candidate with the
highest score - log E is drawn. The chance of a candidate is its estimated chance to be drawn, if the target's scores
are the draft's scores up to a scale alpha: softmax(alpha * score - log E). Greedy decoding is the case without noise.

Shapes: B sequences, L branches, M candidates of a depth, K children kept of a depth, C depths, N nodes, V vocabulary.
"""

from __future__ import annotations

import heapq

import torch

from hf_domino.decoding.branches import Branches
from hf_domino.decoding.tree import Tree

NUM_BRANCHES = 8  # enough for trees of 32 nodes
# The extra time that a CPU needs to verify a tree instead of a chain, as a number of nodes. It is spent on the mask and
# on moving accepted branches to the front.
BRANCHING = 6


def grow(branches: Branches, num_nodes: int, least_chance: float = 0.0, ends: torch.Tensor | None = None) -> Tree:
    """Grow trees of the most likely nodes, with their chances.

    On a CPU, the host reads the chances of the children at each depth. It stops extending branches whose chance is too
    small for the N best nodes of their sequence, or below `least_chance`. On other devices, nothing is copied to the
    host, and all shapes are fixed.

    Args:
        branches ([`Branches`]): Provides the children of each depth.
        num_nodes (`int`): Maximum number of nodes (N).
        least_chance (`float`, *optional*, defaults to 0.0): Nodes that are less likely to be accepted are left out. It
            only has an effect if the host reads the chances.
        ends (`torch.Tensor`, *optional*): End-of-text tokens. If they are passed, nothing is copied to the host even on
            a CPU, so that the function can be captured. Defaults to the end-of-text tokens of the distribution.
    """
    num_rows = len(branches.prefixes.ids)
    device = branches.prefixes.ids.device
    is_read = ends is None and device.type == "cpu"
    if ends is None:
        ends = torch.tensor(sorted(branches.distribution.stops.eos_token_ids), dtype=torch.long, device=device)
    found: list[tuple[torch.Tensor, ...]] = []  # chances, tokens and parents' places of each depth's children, [B, K]
    best: list[list[float]] = [[] for _ in range(num_rows)]  # chances of each sequence's N best nodes so far
    values = torch.ones(num_rows, 1, dtype=torch.float32, device=device)  # chances of the branches, [B, L]
    # The index of each branch's node among all children so far; -1 for the anchor.
    places = torch.full((num_rows, 1), -1, device=device)
    num_found = 0
    for depth in range(branches.num_depths):
        chances, ids = branches.children(depth)
        children = (values[..., None] * chances).flatten(1)
        values, index = children.topk(min(num_nodes, children.shape[1]))  # the most likely first
        owners = index // ids.shape[2]
        tokens = ids.expand(chances.shape).flatten(1).gather(1, index)
        found.append((values, tokens, places.gather(1, owners)))
        width = min(values.shape[1], NUM_BRANCHES)
        if is_read:
            width = _worthwhile(values, best, num_nodes, least_chance)
        if not width or depth + 1 == branches.num_depths:
            break
        tokens = tokens[:, :width]
        branches.advance(tokens, owners[:, :width])
        places = torch.arange(num_found, num_found + width, device=device).expand(num_rows, -1)
        num_found += values.shape[1]
        values = values[:, :width].masked_fill(torch.isin(tokens, ends), 0.0)  # nothing grows after a text's end
    return _best_of(found, num_nodes, least_chance, is_read, branches.scorer.min_nodes)


def _worthwhile(values: torch.Tensor, best: list[list[float]], num_nodes: int, least_chance: float) -> int:
    """How many branches to extend, given the children's chances `[B, K]`; updates each sequence's `best` chances."""
    width = 0
    for row, found in enumerate(values.tolist()):
        best[row] = heapq.nlargest(num_nodes, (*best[row], *found))
        least = max(least_chance, best[row][-1] if len(best[row]) == num_nodes else 0.0)
        width = max(width, sum(value > least for value in found[:NUM_BRANCHES]))
    return width


def _best_of(
    found: list[tuple[torch.Tensor, ...]], num_nodes: int, least_chance: float, is_read: bool, min_nodes: int
) -> Tree:
    """Make a tree of the most likely nodes of all depths."""
    all_values, tokens, parents = (torch.cat(pieces, dim=1) for pieces in zip(*found, strict=True))
    values, order = all_values.sort(dim=1, descending=True, stable=True)
    count = min(num_nodes, values.shape[1])
    if is_read:  # drop nodes without a chance: they can be children of a missing branch, or duplicates
        count = max(int((values[:, :count].mean(dim=0) > least_chance).sum()), min_nodes)
        if not count:
            return Tree(tokens[:, :0])
    # The stable sort keeps the earlier one of two equal nodes, so a parent is never missing.
    kept = order[:, :count].sort(dim=1).values  # [B, N]
    tokens = tokens.gather(1, kept)
    chances = all_values.gather(1, kept)
    parents = torch.searchsorted(kept, parents.gather(1, kept), right=True)
    if not is_read:
        return Tree(tokens, parents, len(found), chances)
    # Put the trunk, the path that is accepted most often, at the front, where a chain has its tokens. If the other
    # branches are not worth their time, propose the trunk alone.
    trunks = [_trunk(row) for row in parents.tolist()]
    if len(trunks) == 1 and not _branches_pay(chances[0].tolist(), trunks[0], least_chance):
        alone = torch.tensor(trunks)
        return Tree(tokens.gather(1, alone), chances=chances.gather(1, alone))
    orders = [trunk + [node for node in range(count) if node not in trunk] for trunk in trunks]
    behind = [[0] + [row.index(node) + 1 for node in range(count)] for row in orders]
    order, places = (torch.tensor(rows) for rows in (orders, behind))
    parents = places.gather(1, parents.gather(1, order))
    return Tree(tokens.gather(1, order), parents, len(found), chances.gather(1, order))


def _branches_pay(chances: list[float], trunk: list[int], least_chance: float) -> bool:
    """Whether the nodes outside the trunk are worth their time and the extra time to verify a tree."""
    beside = sum(chances) - sum(chances[node] for node in trunk)
    return beside > least_chance * (len(chances) - len(trunk) + BRANCHING)


def _trunk(parents: list[int]) -> list[int]:
    """The path from the anchor that follows the most likely child of each node; siblings are sorted by chance."""
    trunk = list[int]()
    tip = 0
    for node, parent in enumerate(parents):
        if parent == tip:
            trunk = [*trunk, node]
            tip = node + 1
    return trunk
