"""Growing trees: the likeliest branches behind the anchors, depth by depth.

Up to L lanes, nodes that may have children, stand at each depth of a row. The chances of a lane's children, times its
own, rank the children of all its row's lanes together. The N best nodes of all depths are the tree. As no child is
likelier than its parent, that is best-first search but for ties and for what L lanes cannot carry.

Where the target samples, candidates race under the noise of their step, which target and drafts share: the one whose
score plus luck is highest is drawn. The chance of a candidate is that of winning this race where scores are known up to
a [`Sharpness`]: softmax(alpha * score - log E) with E the step's exponential noise; greedy is the case without noise.
Beside the drafter the text itself is a source: where a lane's last tokens stood before, the token behind them takes the
part of the chance that is learnt of such copies.

Shapes: B rows, L lanes, M candidates of a depth, and with copies one more, K children kept of a depth, S of all depths,
C depths, N nodes, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hf_domino.decoding.correcting.candidates import CandidatePool
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import EXACT_POOL_SIZE, over_drafted
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.chances import Chances, Decided, Race
from hf_domino.decoding.tree.copies import CopyLanes
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.tree.lanes import DominoLanes
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel

NUM_LANES = 8  # carry 32 nodes


@dataclass(frozen=True)
class Grown:
    """Trees, and how they grew.

    Args:
        tree ([`Tree`]): N nodes of each row.
        chances (`torch.Tensor`): That a node and all before it are accepted, `[B, N]`.
        races (`list[Race]`): Of each depth.
        lanes (`list[list[dict[tuple[int, int], int]]]`): Of each depth and row, the place of each lane by its parent's
            and by its token.
    """

    tree: Tree
    chances: torch.Tensor
    races: list[Race]
    lanes: list[list[dict[tuple[int, int], int]]]

    def decided(self, row: int, tokens: Sequence[int]) -> Iterator[Decided]:
        """The races that a text behind a row's anchor decided."""
        lane, before = 0, -1
        for race, lanes, token in zip(self.races, self.lanes, tokens, strict=False):
            if (lane := lanes[row].get((lane, before), -1)) < 0:
                return
            yield race.decided(row, lane, token)
            before = token


def grow_tree(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
    noise: torch.Tensor | None = None,
    table: InputTable | None = None,
    copies: CopyLanes | None = None,
    *,
    num_nodes: int,
    chances: Chances,
    least_chance: float = 0.0,
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
        copies ([`CopyLanes`], *optional*): How the rows' texts go on.
        num_nodes (`int`): Most nodes (N).
        chances ([`Chances`]): What is known of them.
        least_chance (`float`, *optional*, defaults to 0.0): Nodes that are less likely to be accepted are left out.
    """
    base_logits, law, noise = over_drafted(drafter, target, draft_hidden, prefixes, law, noise)
    size = min(drafter.config.draft_pool_size or EXACT_POOL_SIZE, base_logits.shape[2])
    pool = CandidatePool(base_logits, size, law, prefixes, noise)
    lanes = DominoLanes(drafter, target, draft_hidden, prefixes, pool, table)
    return _Growth(lanes, pool, noise, copies, num_nodes, chances, law.stops.eos_token_ids, least_chance).run()


@dataclass
class _Growth:
    """Trees while they grow; nothing below the bound can be among a row's N best nodes, or is wanted."""

    source: DominoLanes
    pool: CandidatePool
    noise: torch.Tensor | None
    copies: CopyLanes | None
    num_nodes: int
    chances: Chances
    eos_token_ids: frozenset[int]
    least_chance: float
    races: list[Race] = field(default_factory=list)
    lanes: list[list[dict[tuple[int, int], int]]] = field(init=False)
    # Of the children of all depths, [B, K] each; a parent's place among them all, -1 for the anchor.
    values: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)
    parents: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lanes = [[{(0, -1): 0}] * len(self.pool.token_ids)]

    def run(self) -> Grown:
        """Depth by depth, until no child could be among the best."""
        num_rows, device = len(self.pool.token_ids), self.pool.token_ids.device
        places = torch.full((num_rows, 1), -1, device=device)  # [B, L], as parents have them
        values = torch.ones(num_rows, 1, device=device)  # [B, L]
        best, start, depth = values[:, :0], 0, 0
        while True:
            chances, ids = self._race(depth)
            children = (values[..., None] * chances).flatten(1)
            found = children.topk(min(self.num_nodes, children.shape[1]))
            owners, tokens = self._keep(found, ids.expand(chances.shape), places)
            best = torch.cat((best, found.values), dim=1)
            best = best.topk(min(self.num_nodes, best.shape[1])).values
            width, may_grow = self._width(found.values, tokens, best)
            depth += 1
            if not width or depth == self.num_depths:
                return self._result()
            values, index = (found.values * may_grow).topk(width)
            places, start = start + index, start + found.values.shape[1]
            if not self._go_on(depth, owners.gather(1, index), tokens.gather(1, index)):
                return self._result()

    @property
    def num_depths(self) -> int:
        """How deep the sources go."""
        return max(self.source.num_depths, self.copies.num_depths if self.copies else 0)

    def _race(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Chances `[B, L, M]` of the children of all lanes, and their tokens `[B, 1 or L, M]`."""
        race = Race(copied=None if self.copies is None else self.copies.found(depth))
        if depth < self.source.num_depths:
            luck = None
            if self.noise is not None:
                luck = -self.noise[:, depth].gather(1, self.pool.columns[:, depth]).log()
            race = Race(self.source.scores(depth), luck, self.pool.token_ids[:, depth], race.copied)
        self.races.append(race)
        return self.chances.of(race)

    def _keep(
        self, found: torch.return_types.topk, ids: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the likeliest children of a depth; returns the lanes that they stand behind and their tokens."""
        owners, tokens = found.indices // ids.shape[2], ids.flatten(1).gather(1, found.indices)
        self.values.append(found.values)
        self.tokens.append(tokens)
        self.parents.append(places.gather(1, owners))
        return owners, tokens

    def _width(self, values: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> tuple[int, torch.Tensor]:
        """How many lanes go on, and which children may be among them."""
        least = best[:, -1:] if best.shape[1] == self.num_nodes else best.new_zeros(1)
        may_grow = values > least.clamp_min(self.least_chance)
        if self.eos_token_ids:
            may_grow &= ~torch.isin(tokens, tokens.new_tensor(sorted(self.eos_token_ids)))
        return min(int(may_grow.sum(dim=1).max()), NUM_LANES), may_grow

    def _go_on(self, depth: int, owners: torch.Tensor, tokens: torch.Tensor) -> bool:
        """Advance the sources that go so deep; returns whether there is any."""
        rows = [list(zip(*row, strict=True)) for row in zip(owners.tolist(), tokens.tolist(), strict=True)]
        self.lanes.append([{key: lane for lane, key in enumerate(row)} for row in rows])
        if self.copies is not None:
            self.copies.advance(rows)
        if depth < self.source.num_depths:
            self.source.advance(owners, tokens)
            return True
        return self.copies is not None and self.copies.found(depth) is not None

    def _result(self) -> Grown:
        all_values = torch.cat(self.values, dim=1)
        values, order = all_values.sort(dim=1, descending=True, stable=True)
        # What has no chance stands behind no lane, and may be there twice.
        is_wanted = values[:, : self.num_nodes].mean(dim=0) > self.least_chance
        # Of equals the one that came first is kept, so no parent is missing.
        kept = order[:, : max(int(is_wanted.sum()), 1)].sort(dim=1).values  # [B, N]
        tokens, parents = (torch.cat(pieces, dim=1).gather(1, kept) for pieces in (self.tokens, self.parents))
        tree = Tree(tokens, torch.searchsorted(kept, parents, right=True), len(self.races))
        return Grown(tree, all_values.gather(1, kept), self.races, self.lanes)
