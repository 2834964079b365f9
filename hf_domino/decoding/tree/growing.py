"""Growing a tree: the likeliest branches behind an anchor, depth by depth.

Up to L lanes, nodes that may have children, stand at each depth. A source gives the scores of each lane's candidates;
their chances, times the lane's own, rank the children of all lanes together. The N best nodes of all depths are the
tree. As no child is likelier than its parent, that is best-first search but for ties and for what L lanes cannot carry.

Where the target samples, candidates race under the noise of their step, which target and drafts share: the one whose
score plus luck is highest is drawn. The chance of a node is that of winning this race where scores are known up to a
[`Sharpness`]: softmax(alpha * score - log E) with E the step's exponential noise; greedy is the case without noise.

Shapes: L lanes, M candidates of a depth, C depths, N nodes, G width of the prefix state, R low rank, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hf_domino.decoding.correcting.candidates import CandidatePool
from hf_domino.decoding.correcting.corrections import read_tokens
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import EXACT_POOL_SIZE, over_drafted
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.form import Tree
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel

NUM_LANES = 8  # carry 32 nodes


class DominoLanes:
    """Scores of lanes by the backbone's base logits and the correction head, if there is one.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Gives embeddings.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[1, C, H]`.
        prefixes ([`Prefixes`]): The tokens so far, the anchor last.
        pool ([`CandidatePool`]): Candidates of each depth.
        table ([`InputTable`], *optional*): Input products to use and to add to.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        draft_hidden: torch.Tensor,
        prefixes: Prefixes,
        pool: CandidatePool,
        table: InputTable | None = None,
    ):
        self._pool, self._prefixes, self._target, self._table = pool, prefixes, target, table
        self._texts = prefixes.last()[:, :0]  # [L, depth]
        self._has_head = drafter.has_correction_head
        if self._has_head:
            self._gru, self._projection = drafter.prefix_gru, drafter.embed_proj
            self._first_corrected = drafter.config.pure_draft_prefix_len
            self._block_part = self._projection.project_hidden(draft_hidden)[0]  # [C, R]
            state = self._gru.initial_state(1)
            self._states = read_tokens(self._gru, target, prefixes.last()[0], state, table)  # [L, G]

    @property
    def num_depths(self) -> int:
        """How deep it can go (C)."""
        return self._pool.token_ids.shape[1]

    def scores(self, depth: int) -> torch.Tensor:
        """The draft law's scores `[L, M]` of the candidates behind each lane."""
        logits = self._pool.logits[:, depth]
        if self._has_head and depth >= self._first_corrected:
            low_rank = self._block_part[depth] + self._projection.project_state(self._states)
            rows = self._projection.rows(self._pool.columns[0, depth])
            logits = logits + torch.nn.functional.linear(self._projection[1](low_rank), rows).to(logits)
        elif len(self._texts) > 1:
            logits = logits.expand(len(self._texts), -1)
        return self._pool.scores(logits, self._texts)

    def advance(self, lanes: torch.Tensor, tokens: Sequence[int]) -> None:
        """Go on with lanes behind these `[L']`, each by a token."""
        ids = torch.tensor(tokens, device=self._texts.device)
        self._texts = torch.cat((self._texts[lanes], ids[:, None]), dim=1)
        if self._has_head:
            self._states = read_tokens(self._gru, self._target, ids, self._states[lanes], self._table)


@dataclass(frozen=True)
class Race:
    """What the children of the lanes of one depth were ranked by.

    Args:
        scores (`torch.Tensor`): The draft law's, `[L, M]`.
        luck (`torch.Tensor`, *optional*): What noise adds, `[M]`; None for greedy.
        token_ids (`torch.Tensor`): The candidates, `[M]`.
    """

    scores: torch.Tensor
    luck: torch.Tensor | None
    token_ids: torch.Tensor

    def totals(self, sharpness: float) -> torch.Tensor:
        """What wins, `[L, M]`: its softmax is each candidate's chance."""
        raced = sharpness * self.scores
        return raced if self.luck is None else raced + self.luck


@dataclass(frozen=True)
class Node:
    """A node, or a candidate to be one.

    Args:
        log_chance (`float`): That it and all before it are accepted.
        token (`int`): Its token.
        parent (`int`): Which node it stands behind; -1 for the anchor.
    """

    log_chance: float
    token: int
    parent: int


@dataclass(frozen=True)
class Grown:
    """A tree, and how it grew.

    Args:
        tree ([`Tree`]): Its N nodes.
        nodes (`list[Node]`): The same on the host, parents by their places in this list.
        races (`list[Race]`): Of each depth.
        lanes (`dict[int, tuple[int, int]]`): Depth and lane of every node that was given children.
    """

    tree: Tree
    nodes: list[Node]
    races: list[Race]
    lanes: dict[int, tuple[int, int]]

    @property
    def log_chances(self) -> torch.Tensor:
        """Of its nodes to be accepted with all before them, `[1, N]`."""
        return torch.tensor([[node.log_chance for node in self.nodes]])

    def path(self, tokens: Sequence[int]) -> Iterator[tuple[Race, int, int]]:
        """The races that a text behind the anchor decided: race, lane, and place of the winner."""
        children = {(node.parent, node.token): place for place, node in enumerate(self.nodes)}
        node = -1
        for token in tokens:
            if node not in self.lanes:
                return
            depth, lane = self.lanes[node]
            race = self.races[depth]
            winners = (race.token_ids == token).nonzero()[:, 0].tolist()
            if winners:
                yield race, lane, winners[0]
            if (node, token) not in children:
                return
            node = children[node, token]


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
    sharpness: float,
    least_chance: float = 0.0,
) -> Grown:
    """Grow the tree of the likeliest nodes, at least one.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[1, C, H]`.
        prefixes ([`Prefixes`]): Tokens so far of one row, the anchor last.
        law ([`TokenLaw`]): What drafts are chosen from; it passes [`fits_pool`].
        noise (`torch.Tensor`, *optional*): Standard exponential, `[1, C, V]` or of more positions.
        table ([`InputTable`], *optional*): Products of the generation's earlier rounds.
        num_nodes (`int`): Most nodes (N).
        sharpness (`float`): Alpha.
        least_chance (`float`, *optional*, defaults to 0.0): Nodes that are less likely to be accepted are left out.
    """
    base_logits, law, noise = over_drafted(drafter, target, draft_hidden, prefixes, law, noise)
    size = min(drafter.config.draft_pool_size or EXACT_POOL_SIZE, base_logits.shape[2])
    pool = CandidatePool(base_logits, size, law, prefixes, noise)
    lanes = DominoLanes(drafter, target, draft_hidden, prefixes, pool, table)
    bound = math.log(least_chance) if least_chance else -math.inf
    return _Growth(lanes, pool, noise, num_nodes, sharpness, law.stops.eos_token_ids, bound).run()


@dataclass
class _Growth:
    """A tree while it grows; nothing below the bound can be among its N best nodes, or is wanted."""

    source: DominoLanes
    pool: CandidatePool
    noise: torch.Tensor | None
    num_nodes: int
    sharpness: float
    eos_token_ids: frozenset[int]
    bound: float
    nodes: list[Node] = field(default_factory=list)  # all that were looked at, a parent before its children
    races: list[Race] = field(default_factory=list)
    lanes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self) -> Grown:
        """Depth by depth, until no child could be among the best."""
        lanes, log_chances = [-1], torch.zeros(1, 1)  # node of each lane; [L, 1]
        for depth in range(self.source.num_depths):
            race = self._race(depth)
            self.lanes |= {node: (depth, lane) for lane, node in enumerate(lanes)}
            children = (log_chances + race.totals(self.sharpness).log_softmax(dim=1)).flatten()
            best = children.nan_to_num(-torch.inf).topk(min(self.num_nodes, len(children)))
            owners, places = best.indices // len(race.token_ids), best.indices % len(race.token_ids)
            first, tokens = len(self.nodes), race.token_ids[places].tolist()
            for value, token, owner in zip(best.values.tolist(), tokens, owners.tolist(), strict=True):
                if value > self.bound or not self.nodes:
                    self.nodes.append(Node(value, token, lanes[owner]))
            ranked = self._ranked()
            if len(ranked) == self.num_nodes:
                self.bound = max(self.bound, self.nodes[ranked[-1]].log_chance)
            growing = [index for index in range(len(self.nodes) - first) if self._may_grow(self.nodes[first + index])]
            if not (growing := growing[:NUM_LANES]) or depth + 1 == self.source.num_depths:
                break
            lanes = [first + index for index in growing]
            log_chances = best.values[growing, None]
            self.source.advance(owners[growing], [self.nodes[node].token for node in lanes])
        return self._result()

    def _race(self, depth: int) -> Race:
        luck = None
        if self.noise is not None:
            luck = -self.noise[0, depth].gather(0, self.pool.columns[0, depth]).log()
        self.races.append(Race(self.source.scores(depth), luck, self.pool.token_ids[0, depth]))
        return self.races[-1]

    def _ranked(self) -> list[int]:
        """The N best nodes, the likeliest first; of equals the one that came first, so that no parent is missing."""
        return sorted(range(len(self.nodes)), key=lambda node: -self.nodes[node].log_chance)[: self.num_nodes]

    def _may_grow(self, node: Node) -> bool:
        return node.log_chance > self.bound and node.token not in self.eos_token_ids

    def _result(self) -> Grown:
        kept = sorted(self._ranked())
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        nodes = [Node(node.log_chance, node.token, places[node.parent]) for node in map(self.nodes.__getitem__, kept)]
        ids = torch.tensor([[node.token for node in nodes], [node.parent + 1 for node in nodes]])
        tokens, parents = ids.to(self.pool.token_ids.device)[:, None]
        lanes = {places[node]: where for node, where in self.lanes.items() if node in places}
        return Grown(Tree(tokens, parents, len(self.races)), nodes, self.races, lanes)
