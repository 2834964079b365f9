"""Growing trees: the likeliest branches behind the anchors, depth by depth.

Up to L branches, nodes that may have children, stand at each depth of a row. The chances of a branch's children, times
its own, rank the children of all its row's branches together. The N best nodes of all depths are the tree. As no child
is likelier than its parent, that is best-first search but for ties and for what L branches cannot carry.

Where the target samples, target and drafts share the exponential noise E of a step: the candidate whose score less
log E is highest is drawn. The chance of a candidate is that of being drawn where scores are known up to a scale alpha:
softmax(alpha * score - log E). Greedy is the case without noise.

Shapes: B rows, L branches, M candidates of a depth, K children kept of a depth, C depths, N nodes, V vocabulary.
"""

from __future__ import annotations

import heapq

import torch

from hf_domino.decoding.branches import DraftBranches
from hf_domino.decoding.tree import Tree

NUM_BRANCHES = 8  # carry 32 nodes
# Nodes whose time a CPU needs to verify a tree in place of a chain: its mask, and moving what is kept of branches.
BRANCHING = 6


def grow(branches: DraftBranches, num_nodes: int, least_chance: float = 0.0, ends: torch.Tensor | None = None) -> Tree:
    """Grow trees of the likeliest nodes, at least one, with their chances.

    On a CPU the host reads how likely the children of a depth are: what is below the bound cannot be among a row's N
    best nodes, or is not wanted. Elsewhere nothing is read, and all shapes are fixed.

    Args:
        branches ([`DraftBranches`]): Gives the children of each depth.
        num_nodes (`int`): Most nodes (N).
        least_chance (`float`, *optional*, defaults to 0.0): Nodes that are less likely to be accepted are left out,
            where the host reads chances.
        ends (`torch.Tensor`, *optional*): Tokens that end a text, where nothing may be read back, so that it can be
            captured; else those that the distribution knows.
    """
    num_rows = len(branches.texts)
    device = branches.texts.device
    is_read = ends is None and device.type == "cpu"
    if ends is None:
        ends = torch.tensor(sorted(branches.distribution.stops.eos_token_ids), dtype=torch.long, device=device)
    found: list[tuple[torch.Tensor, ...]] = []  # of the children of each depth [B, K]: chances, tokens, parents' places
    best: list[list[float]] = [[] for _ in range(num_rows)]  # chances of each row's N best nodes, as far as read
    values = torch.ones(num_rows, 1, dtype=torch.float32, device=device)  # of branches, [B, L]
    # Among all children; -1 for the anchor.
    places = torch.full((num_rows, 1), -1, device=device)
    num_found = 0
    for depth in range(branches.num_depths):
        chances, ids = branches.children(depth)
        children = (values[..., None] * chances).flatten(1)
        values, index = children.topk(min(num_nodes, children.shape[1]))  # the likeliest first
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
        values = values[:, :width].masked_fill(torch.isin(tokens, ends), 0.0)  # nothing grows behind a text's end
    return _best_of(found, num_nodes, least_chance, is_read)


def _worthwhile(values: torch.Tensor, best: list[list[float]], num_nodes: int, least_chance: float) -> int:
    """How many branches go on behind children of these chances `[B, K]`; notes the best chances of each row."""
    width = 0
    for row, found in enumerate(values.tolist()):
        best[row] = heapq.nlargest(num_nodes, (*best[row], *found))
        least = max(least_chance, best[row][-1] if len(best[row]) == num_nodes else 0.0)
        width = max(width, sum(value > least for value in found[:NUM_BRANCHES]))
    return width


def _best_of(found: list[tuple[torch.Tensor, ...]], num_nodes: int, least_chance: float, is_read: bool) -> Tree:
    """The likeliest nodes of all depths."""
    all_values, tokens, parents = (torch.cat(pieces, dim=1) for pieces in zip(*found, strict=True))
    values, order = all_values.sort(dim=1, descending=True, stable=True)
    count = min(num_nodes, values.shape[1])
    if is_read:  # what has no chance stands behind no branch, and may be there twice
        count = max(int((values[:, :count].mean(dim=0) > least_chance).sum()), 1)
    # Of equals the one that came first is kept, so no parent is missing.
    kept = order[:, :count].sort(dim=1).values  # [B, N]
    tokens = tokens.gather(1, kept)
    chances = all_values.gather(1, kept)
    parents = torch.searchsorted(kept, parents.gather(1, kept), right=True)
    if not is_read:
        return Tree(tokens, parents, len(found), chances)
    # What is accepted most often stands where a chain's tokens do; that alone where branches are not worth their time.
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
    """Whether the nodes of a tree beside its trunk are worth their time, and that of verifying a tree."""
    beside = sum(chances) - sum(chances[node] for node in trunk)
    return beside > least_chance * (len(chances) - len(trunk) + BRANCHING)


def _trunk(parents: list[int]) -> list[int]:
    """The nodes from the anchor on, each the likeliest child of the one before; siblings go by chance."""
    trunk = list[int]()
    tip = 0
    for node, parent in enumerate(parents):
        if parent == tip:
            trunk = [*trunk, node]
            tip = node + 1
    return trunk
