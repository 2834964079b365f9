"""Growing trees: the likeliest branches behind the anchors, depth by depth.

Up to L lanes, nodes that may have children, stand at each depth of a row. The chances of a lane's children, times its
own, rank the children of all its row's lanes together. The N best nodes of all depths are the tree. As no child is
likelier than its parent, that is best-first search but for ties and for what L lanes cannot carry.

Where the target samples, candidates race under the noise of their step, which target and drafts share: the one whose
score plus luck is highest is drawn. The chance of a candidate is that of winning this race where scores are known up to
a scale: softmax(alpha * score - log E) with E the step's exponential noise; greedy is the case without noise.

Shapes: B rows, L lanes, M candidates of a depth, K children kept of a depth, C depths, N nodes, V vocabulary, H hidden
size.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch

from hf_domino.decoding.correcting.candidates import CandidatePool
from hf_domino.decoding.correcting.fused import fits_kernels
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import EXACT_POOL_SIZE, over_drafted
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.tree.lanes import DominoLanes, SteppingLanes
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel

NUM_LANES = 8  # carry 32 nodes
# Nodes whose time a CPU needs to verify a tree in place of a chain: its mask, and moving what is kept of branches.
BRANCHING = 6


@dataclass(frozen=True)
class Grown:
    """Trees, and what their nodes promise.

    Args:
        tree ([`Tree`]): N nodes of each row.
        chances (`torch.Tensor`): That a node and all before it are accepted, `[B, N]`.
    """

    tree: Tree
    chances: torch.Tensor


def grow_tree(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
    noise: torch.Tensor | None = None,
    table: InputTable | None = None,
    *,
    num_nodes: int,
    least_chance: float = 0.0,
    ends: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> Grown:
    """Grow trees of the likeliest nodes, at least one.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, C, H]`.
        prefixes ([`Prefixes`]): Tokens so far of the B rows, the anchor last.
        law ([`TokenLaw`]): What drafts are chosen from; it passes [`fits_pool`].
        noise (`torch.Tensor`, *optional*): Standard exponential, `[B, C, V]` or of more positions.
        table ([`InputTable`], *optional*): Products of the generation's earlier rounds.
        num_nodes (`int`): Most nodes (N).
        least_chance (`float`, *optional*, defaults to 0.0): Nodes that are less likely to be accepted are left out,
            where the host reads chances.
        ends (`torch.Tensor`, *optional*): Tokens that end a text, on the device; defaults to those that the law knows.
        is_fixed (`bool`, *optional*, defaults to `False`): Whether to read nothing back, so that it can be captured.
    """
    base_logits, law, noise = over_drafted(drafter, target, draft_hidden, prefixes, law, noise)
    size = min(drafter.config.draft_pool_size or EXACT_POOL_SIZE, base_logits.shape[2])
    pool = CandidatePool(base_logits, size, law, prefixes, noise)
    is_fused = fits_kernels(drafter, law, base_logits, noise)
    lanes = DominoLanes(drafter, target, draft_hidden, prefixes, pool, noise, table, is_fused)
    return grow(lanes, prefixes, law, num_nodes, least_chance, ends, is_fixed)


def grow(
    source: DominoLanes | SteppingLanes,
    prefixes: Prefixes,
    law: TokenLaw,
    num_nodes: int,
    least_chance: float = 0.0,
    ends: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> Grown:
    """Grow trees of what a source gives; other arguments are those of [`grow_tree`].

    Args:
        source ([`DominoLanes`] or [`SteppingLanes`]): Candidates and their scores, depth by depth.
    """
    device = prefixes.ids.device if ends is None else ends.device
    is_read = not is_fixed and device.type == "cpu"
    if ends is None:
        ends = torch.tensor(sorted(law.stops.eos_token_ids), dtype=torch.long, device=device)
    growth = _Growth(source, len(prefixes.rows), num_nodes, ends, least_chance, is_read)
    growth.run()
    return growth.result()


@dataclass
class _Growth:
    """Trees while they grow.

    On a CPU the host reads how likely the children of a depth are: what is below the bound cannot be among a row's N
    best nodes, or is not wanted. Elsewhere nothing is read, and all shapes are fixed.
    """

    source: DominoLanes | SteppingLanes
    num_rows: int
    num_nodes: int
    ends: torch.Tensor
    least_chance: float
    is_read: bool
    # Of the children of all depths, [B, K] each; a parent's place among them all, -1 for the anchor.
    values: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    parents: list[torch.Tensor] = field(default_factory=list)
    best: list[list[float]] = field(init=False)  # chances of the N best nodes of each row, as far as they are read

    def __post_init__(self) -> None:
        self.best = [[] for _ in range(self.num_rows)]

    def run(self) -> None:
        """Grow depth by depth, until no child could be among the best."""
        num_rows, device = self.num_rows, self.ends.device
        places = torch.full((num_rows, 1), -1, device=device)  # [B, L], as parents have them
        values, num_found = torch.ones(num_rows, 1, dtype=torch.float32, device=device), 0  # values: [B, L]
        for depth in range(self.source.num_depths):
            chances, ids = self.source.children(depth)
            children = (values[..., None] * chances).flatten(1)
            found = children.topk(min(self.num_nodes, children.shape[1]))  # the likeliest first
            owners = found.indices // ids.shape[2]
            tokens = ids.expand(chances.shape).flatten(1).gather(1, found.indices)
            self.values.append(found.values)
            self.tokens.append(tokens)
            self.parents.append(places.gather(1, owners))
            width = self._width(found.values) if depth + 1 < self.source.num_depths else 0
            if not width:
                return
            self.source.advance(owners[:, :width], tokens[:, :width])
            # Nothing grows behind an end of the text.
            values = found.values[:, :width].masked_fill(torch.isin(tokens[:, :width], self.ends), 0.0)
            places = torch.arange(num_found, num_found + width, device=device).expand(num_rows, -1)
            num_found += found.values.shape[1]

    def _width(self, values: torch.Tensor) -> int:
        """How many lanes go on behind children of these chances `[B, K]`."""
        most = min(values.shape[1], NUM_LANES)
        if not self.is_read:
            return most
        width = 0
        for row, found in enumerate(values.tolist()):
            self.best[row] = best = heapq.nlargest(self.num_nodes, (*self.best[row], *found))
            least = max(self.least_chance, best[-1] if len(best) == self.num_nodes else 0.0)
            width = max(width, sum(value > least for value in found[:most]))
        return width

    def result(self) -> Grown:
        """The likeliest nodes of all depths."""
        all_values = torch.cat(self.values, dim=1)
        values, order = all_values.sort(dim=1, descending=True, stable=True)
        count = min(self.num_nodes, values.shape[1])
        if self.is_read:  # what has no chance stands behind no lane, and may be there twice
            count = max(int((values[:, :count].mean(dim=0) > self.least_chance).sum()), 1)
        # Of equals the one that came first is kept, so no parent is missing.
        kept = order[:, :count].sort(dim=1).values  # [B, N]
        tokens, parents = (torch.cat(pieces, dim=1).gather(1, kept) for pieces in (self.tokens, self.parents))
        parents, chances = torch.searchsorted(kept, parents, right=True), all_values.gather(1, kept)
        if not self.is_read:
            return Grown(Tree(tokens, parents, len(self.values)), chances)
        trunks = [_trunk(row) for row in parents.tolist()]
        if len(trunks) == 1 and not self._branches_pay(chances[0].tolist(), trunks[0]):
            alone = torch.tensor(trunks)
            return Grown(Tree(tokens.gather(1, alone)), chances.gather(1, alone))
        # What is accepted most often stands where a chain's tokens do.
        orders = [trunk + [node for node in range(count) if node not in trunk] for trunk in trunks]
        behind = [[0] + [row.index(node) + 1 for node in range(count)] for row in orders]
        order, places = (torch.tensor(rows) for rows in (orders, behind))
        tree = Tree(tokens.gather(1, order), places.gather(1, parents.gather(1, order)), len(self.values))
        return Grown(tree, chances.gather(1, order))

    def _branches_pay(self, chances: list[float], trunk: list[int]) -> bool:
        """Whether the nodes of a tree beside its trunk are worth their time, and that of verifying a tree."""
        num_others = len(chances) - len(trunk)
        return sum(chances) - sum(chances[node] for node in trunk) > self.least_chance * (num_others + BRANCHING)


def _trunk(parents: list[int]) -> list[int]:
    """The nodes from the anchor on, each the likeliest child of the one before; siblings go by chance."""
    trunk, tip = list[int](), 0
    for node, parent in enumerate(parents):
        if parent == tip:
            trunk, tip = [*trunk, node], node + 1
    return trunk
