"""Where the nodes of a depth come from: the scores of their children, and lanes that go on behind some of them.

Shapes: B rows, L lanes of each, M candidates of a depth, C depths, G width of the prefix state, R low rank, H hidden
size, V tokens of the target, D of the draft vocabulary.
"""

from __future__ import annotations

import torch

from domino_kernels import advance_lanes, correct_lanes
from hf_domino.decoding.correcting.candidates import CandidatePool, fits_pool
from hf_domino.decoding.correcting.corrections import FORESEEN, read_tokens
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.noise.steps import DraftNoise, OwnNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import EXACT_POOL_SIZE, Listener
from hf_domino.decoding.sampling import TokenLaw, choose
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.kind import Branches
from hf_domino.target.view import TargetModel

SHARPNESS = 1.2  # alpha, the scale of the draft law's scores: a target is a little surer than its drafter


def chances(scores: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Chances that candidates with these scores `[..., M]` win under their noise; where all are forbidden, none."""
    raced = SHARPNESS * scores
    return (raced if noise is None else raced - noise.log()).softmax(dim=-1).nan_to_num(0.0)


class DominoLanes:
    """Scores of lanes by the backbone's base logits and the correction head, if there is one.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Gives embeddings.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, C, H]`.
        prefixes ([`Prefixes`]): The tokens so far of the B rows, the anchor last.
        pool ([`CandidatePool`]): Candidates of each depth.
        noise (`torch.Tensor`, *optional*): What they are drawn with, `[B, C, D]`.
        table ([`InputTable`], *optional*): Input products to use and to add to.
        is_fused (`bool`, *optional*, defaults to `False`): Whether kernels advance and correct lanes.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        draft_hidden: torch.Tensor,
        prefixes: Prefixes,
        pool: CandidatePool,
        noise: torch.Tensor | None = None,
        table: InputTable | None = None,
        is_fused: bool = False,
    ):
        self._noise, self._pool, self._target, self._table, self._is_fused = noise, pool, target, table, is_fused
        self._texts = prefixes.last()[:, :0, None].mT  # [B, 1, 0], with each depth a token more
        self._head = head = drafter.head
        if head is not None:
            self._first_corrected = drafter.config.pure_draft_prefix_len
            if table is not None:
                likeliest = pool.token_ids[:, :-1, :FORESEEN]
                table.add([*prefixes.last().flatten().tolist(), *likeliest.flatten().tolist()])
            self._parts = head.project_hidden(draft_hidden)  # [B, C, ...]
            self._states = self._read(prefixes.last(), head.initial_state(len(draft_hidden))[:, None])  # [B, L, G]

    @property
    def num_depths(self) -> int:
        """How deep it can go (C)."""
        return self._pool.token_ids.shape[1]

    def children(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Chances `[B, L, M]` of the children of the lanes at this depth, and their tokens `[B, 1, M]`."""
        noise = None
        if self._noise is not None:
            noise = self._noise[:, depth].gather(1, self._pool.columns[:, depth])[:, None]
        return chances(self._scores(depth), noise), self._pool.token_ids[:, depth, None]

    def _scores(self, depth: int) -> torch.Tensor:
        """The draft law's scores `[B, L, M]` of the candidates behind each lane."""
        logits, columns, head = self._pool.logits[:, depth, None], self._pool.columns[:, depth], self._head
        if head is not None and depth >= self._first_corrected:
            if self._is_fused:
                up_weight, state_part = head.up.weight, head.projection.project_state(self._states)
                logits = correct_lanes(logits[:, 0], self._parts[:, depth], state_part, up_weight, columns)
            else:
                activated = head.activate(self._parts[:, depth, None], self._states)  # [B, L, R]
                logits = logits + (activated @ head.rows(columns).mT).to(logits)
        logits = logits.expand(-1, self._texts.shape[1], -1)
        return self._pool.scores(logits.flatten(0, 1), self._texts.flatten(0, 1)).view(logits.shape)

    def advance(self, lanes: torch.Tensor, tokens: torch.Tensor) -> None:
        """Go on with lanes behind these `[B, L']`, each by a token `[B, L']`."""
        before = self._texts.gather(1, lanes[..., None].expand(-1, -1, self._texts.shape[2]))
        self._texts = torch.cat((before, tokens[..., None]), dim=2)
        if self._head is None:
            return
        lanes = lanes.to(self._states.device)
        if self._is_fused:
            gru = self._head.gru
            products = gru.project_inputs(self._target.embed(tokens).to(self._states))  # [B, L', 3G]
            self._states = advance_lanes(products, self._states, lanes, gru.weight_hh_l0)
        else:
            states = self._states.gather(1, lanes[..., None].expand(-1, -1, self._states.shape[2]))
            self._states = self._read(tokens, states)

    def _read(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Read the tokens `[B, L]` that the texts of lanes end with, behind states before these `[B, L, G]`."""
        assert self._head is not None
        part = self._parts[:, self._texts.shape[2], None].expand(-1, states.shape[1], -1).flatten(0, 1)
        flat = read_tokens(self._head, self._target, tokens.flatten(), states.flatten(0, 1), part, self._table)
        return flat.view(*states.shape)


class SteppingLanes:
    """Scores of lanes that each have a law of their own, which has read what they drafted.

    Args:
        drafter ([`DominoDraftModel`]): Makes logits.
        target ([`TargetModel`]): For lm_head.
        hidden (`torch.Tensor`): Draft hidden states behind the anchors, `[B, 1, H]`.
        branches ([`Branches`]): Those behind what is chosen.
        prefixes ([`Prefixes`]): The tokens so far of the B rows, the anchor last.
        law ([`TokenLaw`]): What drafts are chosen from.
        noise (`torch.Tensor` or [`OwnNoise`], *optional*): `[B, C, V]` or of more positions, or nobody else's.
        num_depths (`int`): How deep to go (C).
        size (`int`, *optional*): Candidates of a lane (M); None for all tokens.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        hidden: torch.Tensor,
        branches: Branches,
        prefixes: Prefixes,
        law: TokenLaw,
        noise: DraftNoise | None,
        num_depths: int,
        size: int | None,
    ):
        self._drafter, self._target, self._hidden, self._branches = drafter, target, hidden, branches
        self._prefixes, self._law, self._size = prefixes, law.over(drafter.vocabulary), size
        self.num_depths = num_depths
        self._noise = drafter.vocabulary.gather(noise[:, :num_depths]) if isinstance(noise, torch.Tensor) else None
        self._texts = prefixes.last()[:, :0, None].mT  # [B, 1, 0], with each depth a token more
        self._own = noise if isinstance(noise, OwnNoise) else None

    def children(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Chances of the children of the lanes at this depth, and their tokens, `[B, L, M]` both."""
        scores, noise, token_ids = self._candidates(depth)
        return chances(scores, noise), token_ids

    def advance(self, lanes: torch.Tensor, tokens: torch.Tensor) -> None:
        """Go on with lanes behind these `[B, L']`, each by a token `[B, L']`."""
        before = self._texts.gather(1, lanes[..., None].expand(-1, -1, self._texts.shape[2]))
        self._texts = torch.cat((before, tokens[..., None]), dim=2)
        self._hidden = self._branches.advance(lanes, tokens)

    def chain(self, listener: Listener | None = None) -> torch.Tensor:
        """Choose one token behind the other, in one lane: ids `[B, P]`. Arguments are those of [`rollout`]."""
        tokens = list[torch.Tensor]()
        for depth in range(self.num_depths):
            if tokens:
                self.advance(torch.zeros_like(tokens[-1]), tokens[-1])
            scores, noise, token_ids = self._candidates(depth)  # [B, 1, M]
            noise = noise if self._own is None else self._own.like(scores)
            tokens.append(token_ids.gather(2, choose(scores, noise)[..., None])[..., 0])
            if listener is not None:
                listener(scores[:, 0], token_ids[:, 0])
        return torch.cat(tokens, dim=1)

    def _candidates(self, depth: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Scores of each lane's candidates, the noise they are drawn with, and their ids, all `[B, L, M]`."""
        num_rows, num_lanes, _ = self._texts.shape
        texts = self._prefixes.lanes(num_lanes).along(self._texts.flatten(0, 1), 1)
        logits = self._drafter.kind.logits(self._target, self._hidden.to(self._texts.device))
        logits, law = self._law.settled(texts, logits.flatten(0, 1)[:, None])  # [B * L, 1, D]
        no_tokens, noise = self._texts.flatten(0, 1)[:, :0], None
        if self._noise is not None:
            noise = self._noise[:, depth, None].expand(-1, num_lanes, -1).flatten(0, 1)[:, None]
        if self._size is None or self._size >= logits.shape[2]:
            scores = law.scores(texts, logits, no_tokens)
            columns = torch.arange(logits.shape[2], device=logits.device).expand_as(logits)
        else:
            pool = CandidatePool(logits, self._size, law, texts, noise)
            scores, columns = pool.scores(pool.logits[:, 0], no_tokens)[:, None], pool.columns
            noise = None if noise is None else noise.gather(2, columns)
        token_ids = law.vocabulary.ids(columns)
        shape = (num_rows, num_lanes, -1)
        return scores.view(shape), None if noise is None else noise.view(shape), token_ids.view(shape)


def pool_size(drafter: DominoDraftModel, law: TokenLaw, is_tree: bool) -> int | None:
    """Candidates of each of [`SteppingLanes`]; None for all tokens, where the draft law or the configuration wants it.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        law ([`TokenLaw`]): What drafts are chosen from.
        is_tree (`bool`): Whether lanes branch, for which all tokens would be too many.
    """
    size = drafter.config.draft_pool_size or (EXACT_POOL_SIZE if is_tree else None)
    return size if size is not None and fits_pool(law, size) else None
