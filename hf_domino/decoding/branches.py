"""`DraftBranches`: paths that are drafted side by side, depth by depth. A chain is drafted in a single branch.

There are two ways to score a branch. In most methods, a correction head adds W2 activate(part, state) to the base
logits of a depth, where the state of a branch has read the anchor and the branch's tokens. The backbone is not run
again (`CorrectedBranches`). In the others, each draft token reads the ones before it, so the drafter computes new
logits for every branch (`AutoregressiveBranches`). Either way, tokens are chosen among the most likely candidates of a
depth if the draft distribution allows it, and otherwise among all tokens of the draft vocabulary.

Shapes: B sequences, L branches of each, M candidates of a depth, C depths, G width of the prefix state, R low rank, H
hidden size, V tokens of the target, D tokens of the draft vocabulary (D is V without one).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import TemperatureLogitsWarper

from domino_kernels import advance_branches, correct_and_choose, correct_branches, runs_triton
from hf_domino.decoding.candidates import CandidatePool, pool_size
from hf_domino.decoding.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution, choose
from hf_domino.decoding.tree import along
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.interface import Branches
from hf_domino.targets.view import TargetModel

# The scores of each branch's candidates `[B, L, M]`, the noise to draw them with, and their ids. Noise and ids have the
# same shape, or `[B, 1, M]` if all branches share them.
Candidates = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
SHARPNESS = 1.2  # alpha, which scales the draft scores up, because a target is a little more certain than its drafter
NUM_PRECOMPUTED = 2  # input products are computed in advance, all together, for this many likely tokens of each depth


class DraftBranches(ABC):
    """The branches of a round, which start as one empty path after the anchor of each sequence.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Provides the embeddings and the lm_head.
        hidden (`torch.Tensor`): The drafter's output for the positions after the anchors, `[B, C, ...]`, possibly with
            fewer or more depths.
        prefixes ([`Prefixes`]): The tokens so far of the B sequences; the last one is the anchor.
        distribution ([`TokenDistribution`]): The distribution that draft tokens are chosen from. For trees, it must
            pass [`fits_pool`].
        noise (`torch.Tensor`, *optional*): Standard exponential noise to draw draft tokens with, `[B, C, V]` or for
            more positions. Without it, the most likely tokens are chosen.
        num_depths (`int`, *optional*): How many depths to draft (C). Defaults to the number of depths in `hidden`.
        is_tree (`bool`, *optional*, defaults to `False`): Whether branches can fork.
    """

    min_nodes = 1  # how many nodes a tree has at least, even if none is worth its time

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        hidden: torch.Tensor,
        prefixes: Prefixes,
        distribution: TokenDistribution,
        noise: torch.Tensor | None = None,
        num_depths: int | None = None,
        is_tree: bool = False,
    ):
        self.num_depths = num_depths or hidden.shape[1]
        self._drafter = drafter
        self._target = target
        self._hidden = hidden[:, : self.num_depths]
        self.prefixes = prefixes
        self.distribution = distribution.over(drafter.vocabulary.of_target(target))
        self._is_tree = is_tree
        self.texts = prefixes.last()[:, :0, None].mT  # tokens of each branch: [B, 1, 0], one token longer per depth
        self._noise = noise

    @abstractmethod
    def candidates(self, depth: int) -> Candidates:
        """Return the candidates for the next token of each branch."""

    def advance(self, tokens: torch.Tensor, branches: torch.Tensor | None = None) -> None:
        """Extend these branches `[B, L']`, or the only branch if None, by one token `[B, L']` each."""
        self.texts = torch.cat((along(branches, self.texts), tokens[..., None]), dim=2)

    def children(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The chance `[B, L, M]` that each candidate is drawn with its noise (0 if all are forbidden), and the ids."""
        scores, noise, token_ids = self.candidates(depth)
        sampled = SHARPNESS * scores
        return (sampled if noise is None else sampled - noise.log()).softmax(dim=-1).nan_to_num(0.0), token_ids

    def chain(self) -> torch.Tensor:
        """Choose one token after the other, in a single branch; return their ids `[B, C]`."""
        tokens = list[torch.Tensor]()
        for depth in range(self.num_depths):
            if tokens:
                self.advance(tokens[-1])
            tokens.append(self._next(depth))
        return torch.cat(tokens, dim=1)

    def _next(self, depth: int) -> torch.Tensor:
        """Choose the token `[B, 1]` of the only branch at a depth."""
        return self._chosen(*self.candidates(depth))

    def _chosen(self, scores: torch.Tensor, noise: torch.Tensor | None, token_ids: torch.Tensor) -> torch.Tensor:
        """Choose tokens `[B, N]` among candidates `[B, N, M]`."""
        return token_ids.gather(2, choose(scores, noise)[..., None])[..., 0]

    def _seen(self) -> Prefixes:
        """The text of each branch so far: its sequence's prefix followed by the tokens of the branch."""
        return self.prefixes.branches(self.texts.shape[1]).along(self.texts.flatten(0, 1), 1)


class CorrectedBranches(DraftBranches):
    """Branches that are scored by the backbone's base logits and, if there is one, the correction head.

    Args:
        arguments: The arguments of [`DraftBranches`], with draft hidden states `[B, C, H]` of the predicting positions.
        table ([`InputTable`], *optional*): Table of input products, which is used and extended.
        options: The keyword arguments of [`DraftBranches`].
    """

    def __init__(self, *arguments: Any, table: InputTable | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self._head = self._drafter.head
        self._table = table
        if self._noise is not None:
            self._noise = self._drafter.vocabulary.gather(self._noise[:, : self.num_depths])  # [B, C, D]
        self._pool: CandidatePool | None = None
        logits = self._drafter.logits(self._target, self._hidden.to(self.prefixes.ids.device))
        if self._head is not None:
            logits = self._head.narrow(logits)
        self._logits, self.distribution = self.distribution.settled(
            self.prefixes, logits
        )  # [B, C, D], or [B, C, M] once there is a pool
        self._is_fused = fits_kernels(self._drafter, self.distribution, self._logits, self._noise)

    def chain(self) -> torch.Tensor:
        """Choose one token after the other or, if the method and the distribution allow it, all tokens at once."""
        if self.distribution.needs_prefix or not (self._head is None or self._head.num_passes):
            return super().chain()
        noise = self._noise
        token_ids = self._all_ids
        if self._head is None:
            return self._likeliest(self._logits, noise, token_ids)
        self._begin()
        if self._pool is not None:
            token_ids = self._pool.token_ids
            noise = None if noise is None else noise.gather(2, self._pool.columns)
        tokens = self._likeliest(self._logits, noise, token_ids)
        for _ in range(self._head.num_passes or 0):
            tokens = self._likeliest(self._corrected_after(tokens), noise, token_ids)
        return tokens

    def _likeliest(self, logits: torch.Tensor, noise: torch.Tensor | None, token_ids: torch.Tensor) -> torch.Tensor:
        """Choose the tokens `[B, C]` of all depths from their logits `[B, C, M]`."""
        return self._chosen(self.distribution.scores(self.prefixes, logits), noise, token_ids.expand_as(logits))

    def _corrected_after(self, tokens: torch.Tensor) -> torch.Tensor:
        """Correct the logits `[B, C, M]` of all depths by the tokens `[B, C]` that were chosen in the last pass."""
        assert self._head is not None
        before = torch.cat((self.prefixes.last(), tokens[:, :-1]), dim=1)
        states = self._head.read(self._target, before, self._hidden)
        activated = self._head.activate(self._parts, states).flatten(0, 1)[:, None]  # [B * C, 1, R]
        base = self._logits.flatten(0, 1)[:, None]
        rows = None if self._rows is None else self._rows.flatten(0, 1)
        return self._head.correct(self._target, base, activated, rows).view_as(self._logits)

    def _next(self, depth: int) -> torch.Tensor:
        """Choose the token `[B, 1]` of the only branch at a depth. A fused kernel corrects and chooses in one step."""
        head = self._head
        if head is None or not self._is_fused or depth < self._drafter.config.pure_draft_prefix_len:
            return super()._next(depth)
        if not depth:
            self._begin()
        low_rank = self._parts[:, depth] + head.project_state(self._states[:, 0])
        pool = self._pool
        noise = self._noise
        temperature = None
        if noise is not None:
            noise = noise[:, depth]
            temperature = self.distribution.temperature
        column = correct_and_choose(
            self._logits[:, depth],
            low_rank,
            head.up.weight,
            None if pool is None else pool.columns[:, depth],
            noise=noise,
            temperature=temperature,
        )
        return self.distribution.vocabulary.ids(column)[:, None]

    def candidates(self, depth: int) -> Candidates:
        """Return the candidates for the next token of each branch, scored by base logits and corrections."""
        if not depth:
            self._begin()
        logits = self._corrected(depth)
        pool = self._pool
        noise = self._noise
        if noise is not None:
            noise = noise[:, depth, None]
        if pool is None:
            token_ids = self._all_ids.expand(len(logits), 1, -1)
            return self.distribution.scores(self.prefixes, logits, self._seen), noise, token_ids
        if noise is not None:
            noise = noise.gather(2, pool.columns[:, depth, None])
        scores = logits.float()
        if self.distribution.steps:
            scores = pool.scores(logits.flatten(0, 1), self.texts.flatten(0, 1)).view(logits.shape)
        return scores, noise, pool.token_ids[:, depth, None]

    @property
    def _all_ids(self) -> torch.Tensor:
        """The ids `[D]` of all tokens that the drafter can propose."""
        return self.distribution.vocabulary.ids(torch.arange(self._logits.shape[2], device=self._logits.device))

    def _begin(self) -> None:
        """Choose the candidates of each depth, and let the head read the anchors."""
        size = pool_size(self._drafter, self.distribution, self._is_tree)
        head = self._head
        table = self._table
        if size is not None and size < self._logits.shape[2]:
            self._pool = CandidatePool(self._logits, size, self.distribution, self.prefixes, self._noise)
            self._logits = self._pool.logits
        if head is not None:
            self._parts = head.project_hidden(self._hidden)  # [B, C, ...], computed once for all depths
            self._rows = None  # the rows of W2 that belong to the candidates, [B, C, M, R]
            if self._pool is not None and not self._is_fused:
                self._rows = head.rows(self._target, self._pool.columns)
            if table is not None and self._pool is not None:
                likeliest = self._pool.token_ids[:, :-1, :NUM_PRECOMPUTED]
                table.add([*self.prefixes.last().flatten().tolist(), *likeliest.flatten().tolist()])
            start = head.initial_state(len(self._hidden))[:, None]
            self._states = self._read(self.prefixes.last(), start)  # [B, L, G]

    def _corrected(self, depth: int) -> torch.Tensor:
        """The corrected logits `[B, L, M]` of the candidates of each branch."""
        logits = self._logits[:, depth, None]
        head = self._head
        if head is not None and depth >= self._drafter.config.pure_draft_prefix_len:
            if self._is_fused and self._pool is not None:
                up_weight = head.up.weight
                state_part = head.project_state(self._states)
                columns = self._pool.columns[:, depth]
                logits = correct_branches(logits[:, 0], self._parts[:, depth], state_part, up_weight, columns)
            else:
                activated = head.activate(self._parts[:, depth, None], self._states)  # [B, L, R]
                rows = self._rows
                if rows is not None:
                    rows = rows[:, depth]
                logits = head.correct(self._target, logits, activated, rows)
        return logits.expand(-1, self.texts.shape[1], -1)

    def advance(self, tokens: torch.Tensor, branches: torch.Tensor | None = None) -> None:
        """Extend branches, and let the correction head read their new tokens."""
        super().advance(tokens, branches)
        if self._head is None:
            return
        if self._is_fused and branches is not None:
            gru = self._head.gru
            products = gru.project_inputs(self._target.embed(tokens).to(self._states))  # [B, L', 3G]
            self._states = advance_branches(products, self._states, branches.to(self._states.device), gru.weight_hh_l0)
        else:
            self._states = self._read(tokens, along(branches, self._states))

    def _read(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Advance the states `[B, L, G]` of branches by the last token of each, `[B, L]`."""
        assert self._head is not None
        token_ids = tokens.flatten()
        before = states.flatten(0, 1)
        if self._table is not None:
            return self._head.gru.advance(self._table.rows(token_ids.tolist()), before).view(*states.shape)
        part = self._parts[:, self.texts.shape[2], None].expand(-1, states.shape[1], -1).flatten(0, 1)
        return self._head.step(self._target, token_ids, before, part).view(*states.shape)


class AutoregressiveBranches(DraftBranches):
    """Branches whose logits the drafter computes anew at each depth, after reading the tokens of the branch.

    Args:
        branches (`Callable`): Returns draft hidden states for the positions after the chosen tokens. It comes from the
            method's `branches` hook.
        arguments: The arguments of [`DraftBranches`], with draft hidden states `[B, 1, H]` after the anchors.
        options: The keyword arguments of [`DraftBranches`].
    """

    def __init__(self, branches: Branches, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._branches = branches

    def advance(self, tokens: torch.Tensor, branches: torch.Tensor | None = None) -> None:
        """Extend branches, and draft the hidden states after their new tokens."""
        super().advance(tokens, branches)
        if branches is None:  # extend the only one
            branches = torch.zeros_like(tokens)
        self._hidden = self._branches(branches, tokens)

    def candidates(self, depth: int) -> Candidates:
        """Return the candidates for the next token. Each branch is scored as a sequence of its own with one depth."""
        shape = (*self.texts.shape[:2], -1)
        noise = None
        if self._noise is not None:
            noise = self._noise[:, depth, None].expand(-1, shape[1], -1).flatten(0, 1)[:, None]
        hidden = self._hidden.flatten(0, 1)[:, None]
        alone = CorrectedBranches(
            self._drafter, self._target, hidden, self._seen(), self.distribution, noise, is_tree=self._is_tree
        )
        scores, noise, token_ids = alone.candidates(0)
        return scores.view(shape), None if noise is None else noise.view(shape), token_ids.view(shape)


def fits_kernels(
    drafter: DominoDraftModel,
    distribution: TokenDistribution,
    base_logits: torch.Tensor,
    noise: torch.Tensor | None = None,
) -> bool:
    """Whether fused kernels can choose the drafts: only the correction, temperatures and noise may affect the choice.

    Args:
        drafter ([`DominoDraftModel`]): Provides the correction head, if it has one.
        distribution ([`TokenDistribution`]): The distribution that draft tokens are chosen from.
        base_logits (`torch.Tensor`): Base logits `[B, P, D]`.
        noise (`torch.Tensor`, *optional*): The noise that draft tokens are drawn with.
    """
    # The check looks at `steps`, because torch 2.9 cannot compile `not` of the list `processors`.
    is_plain = not distribution.steps or (
        noise is not None and all(type(p) is TemperatureLogitsWarper for p in distribution.processors)
    )
    head = drafter.head
    return is_plain and head is not None and runs_triton(base_logits) and head.fits_kernels(base_logits.device)
