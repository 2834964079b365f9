"""`Branches`: paths that are drafted side by side, depth by depth. A chain is drafted in a single branch.

The scorer of the drafter's method scores the next tokens of each branch (`methods/scorer.py`). Here, the draft
distribution and the noise are applied to these scores. Tokens are chosen among the most likely candidates of a depth if
the distribution allows it, and otherwise among all tokens of the draft vocabulary.

Shapes: B sequences, L branches of each, M candidates of a depth, C depths, V tokens of the target, D tokens of the
draft vocabulary (D is V without one).
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import TemperatureLogitsWarper

from domino_kernels import runs_triton
from hf_domino.decoding.candidates import pool_columns, pool_size
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.scores import CandidateScores
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.scorer import Scorer, along

SHARPNESS = 1.2  # alpha, which scales the draft scores up, because a target is a little more certain than its drafter


class Branches:
    """The branches of a round, which start as one empty path after the anchor of each sequence.

    Args:
        scorer ([`~methods.scorer.Scorer`]): Scores the next tokens; its round has begun.
        prefixes ([`Prefixes`]): The tokens so far of the B sequences; the last one is the anchor.
        distribution ([`TokenDistribution`]): The distribution that draft tokens are chosen from, as
            [`draft_distribution`] returns it. For trees, it must pass [`fits_pool`].
        noise (`torch.Tensor`, *optional*): Standard exponential noise to draw draft tokens with, `[B, C, V]` or for
            more positions. Without it, the most likely tokens are chosen.
        num_depths (`int`, *optional*): How many depths to draft (C). Defaults to all whose base logits are known.
        is_tree (`bool`, *optional*, defaults to `False`): Whether branches can fork.
    """

    # Of the candidates of each depth that is known, [B, M] or [B * L, M]: their ids, None for all tokens, and the
    # logarithms of their noise.
    _ids: tuple[torch.Tensor, ...] | None
    _log_noise: tuple[torch.Tensor, ...] | None
    _drawn: torch.Tensor | None  # the noise of all of these depths, [B, C, M] or [B * L, 1, M]

    def __init__(
        self,
        scorer: Scorer,
        prefixes: Prefixes,
        distribution: TokenDistribution,
        noise: torch.Tensor | None = None,
        num_depths: int | None = None,
        is_tree: bool = False,
    ):
        self.scorer = scorer
        self.prefixes = prefixes
        self.distribution = distribution
        self.num_depths = num_depths or scorer.logits.shape[1]
        self._noise = noise
        self._is_tree = is_tree
        self._texts = prefixes.ids.new_zeros(len(prefixes.ids), 1, 0)  # [B, L, N], if scores depend on the tokens
        self._narrow(0)

    def children(self, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The chance `[B, L, M]` that each candidate is drawn with its noise (0 if all are forbidden), and the ids."""
        scores = self._with_noise(SHARPNESS * self._scores(depth), depth)
        ids = self._ids_of(depth)
        if ids is None:
            ids = self.scorer.vocabulary.ids(torch.arange(scores.shape[1], device=scores.device))
        shape = (len(self.prefixes.ids), self.scorer.num_branches, -1)
        return scores.softmax(dim=1).nan_to_num(0.0).view(shape), ids.expand_as(scores).reshape(shape)

    def chain(self) -> torch.Tensor:
        """Choose a chain `[B, C]`: token after token or, if the scorer allows it, the tokens of all depths at once."""
        scorer = self.scorer
        if scorer.num_passes is None or self._needs_prefix:
            tokens = [self._next(0)]
            for depth in range(1, self.num_depths):
                self.advance(tokens[-1])
                tokens.append(self._next(depth))
            return torch.cat(tokens, dim=1)
        chosen = self._all_at_once(scorer.logits)
        for _ in range(scorer.num_passes):
            chosen = self._all_at_once(scorer.refine(chosen))
        return chosen

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """Extend these branches `[B, L']`, or the only branch if None, by one token `[B, L']` each."""
        if self._reads_texts:
            self._texts = torch.cat((along(parents, self._texts), tokens[..., None]), dim=2)
        self.scorer.advance(tokens, parents)
        if not self.scorer.is_parallel:
            self._narrow(self._first + 1)

    def _next(self, depth: int) -> torch.Tensor:
        """Choose the token `[B, 1]` of the only branch at a depth. A fused kernel corrects and chooses in one step."""
        scorer = self.scorer
        if self._is_fused and depth >= scorer.drafter.config.pure_draft_prefix_len:
            noise = None if self._noise is None else scorer.vocabulary.gather(self._noise[:, depth])
            return scorer.vocabulary.ids(scorer.choose(depth, noise, self._settled.temperature)[:, None])
        return self._chosen(self._with_noise(self._scores(depth), depth), self._ids_of(depth))

    def _all_at_once(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the tokens `[B, C]` of all depths from their logits `[B, C, M]`."""
        scores = self._settled.scores(self.prefixes, logits)
        if self._drawn is not None:
            scores = scores - self._drawn.log()
        return self._chosen(scores, None if self._ids is None else torch.stack(self._ids, dim=1))[..., 0]

    def _with_noise(self, scores: torch.Tensor, depth: int) -> torch.Tensor:
        """Apply the noise to the scores of a depth, `[B * L, M]`: a draw takes the highest result."""
        if self._drawn is None:
            return scores
        if self._log_noise is None:  # fused kernels do not need it
            self._log_noise = self._drawn.log().unbind(1)
        return scores - self._of_depth(self._log_noise, depth)

    def _chosen(self, scores: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Choose one of the M candidates `[..., M]` of each position; returns tokens `[..., 1]`."""
        columns = scores.argmax(dim=-1, keepdim=True)
        return self.scorer.vocabulary.ids(columns) if ids is None else ids.gather(-1, columns)

    def _narrow(self, depth: int) -> None:
        """Process base logits that have become known, as far as the text so far decides it, and choose candidates."""
        scorer = self.scorer
        logits = scorer.logits
        noise = self._noise
        seen = self.prefixes
        if noise is not None:
            noise = noise[:, depth : depth + logits.shape[1]]  # [B, C, V]
        if not scorer.is_parallel:  # each branch is a sequence of its own, with one depth
            seen = self._seen()
        self._first = depth  # the first depth whose base logits are known
        self._is_fused = False
        self._settled = self.distribution
        columns = scorer.columns
        self._ids = None
        self._log_noise = None
        if columns is None:
            if noise is not None:
                noise = scorer.vocabulary.gather(noise)
            if noise is not None and len(noise) < len(logits):
                noise = noise.repeat_interleave(scorer.num_branches, dim=0)
            logits, self._settled = self.distribution.settled(seen, logits)
            self._is_fused = fits_kernels(scorer.drafter, self._settled, logits, noise)
            self._vocab_size = scorer.vocabulary.total(logits.shape[2])
            size = None
            if scorer.num_passes != 0 or self._is_tree or self._settled.needs_prefix:
                size = pool_size(scorer.drafter, self._settled, self._is_tree)
            # Otherwise, a single choice takes less time than choosing candidates.
            if size is not None and size < logits.shape[2]:
                columns = pool_columns(logits, size, self._settled, seen, noise)
                logits = logits.gather(2, columns)
        if columns is not None:
            self._ids = scorer.vocabulary.ids(columns).unbind(1)
        if columns is not None and noise is not None:
            of_sequence = columns.view(len(noise), noise.shape[1], -1)
            noise = noise.gather(2, of_sequence).view_as(columns)
        self._drawn = noise
        self._needs_prefix = self._settled.needs_prefix
        # Whether the tokens of branches are needed: by the next scores, or by the next base logits.
        self._reads_texts = self._needs_prefix if scorer.is_parallel else self.distribution.needs_prefix
        scorer.narrow(logits, columns, self._is_fused)

    def _ids_of(self, depth: int) -> torch.Tensor | None:
        """The ids of the candidates of a depth, `[B * L, M]`; None if these are all tokens."""
        return None if self._ids is None else self._of_depth(self._ids, depth)

    def _of_depth(self, values: tuple[torch.Tensor, ...], depth: int) -> torch.Tensor:
        """Select what belongs to the candidates of a depth, `[B * L, M]`."""
        return self.scorer.of_branches(values[depth - self._first])

    def _scores(self, depth: int) -> torch.Tensor:
        """The processed scores of the candidates of each branch, `[B * L, M]` in fp32."""
        logits = self.scorer.scores(depth)
        distribution = self._settled
        if not self._needs_prefix:
            return distribution.process(logits, self.prefixes)
        ids = self._ids_of(depth)
        if ids is None:
            by_sequence = logits.unflatten(0, (len(self.prefixes.ids), -1))
            return distribution.scores(self.prefixes, by_sequence, self._seen).flatten(0, 1)
        changeable = partial(CandidateScores, vocab_size=self._vocab_size, token_ids=ids)
        return distribution.process(logits, self._seen(), changeable)

    def _seen(self) -> Prefixes:
        """The text of each branch so far: its sequence's prefix followed by the tokens of the branch."""
        return self.prefixes.branches(self._texts.shape[1]).along(self._texts.flatten(0, 1), 1)


def draft_distribution(scorer: Scorer, distribution: TokenDistribution) -> TokenDistribution:
    """The distribution that a scorer's tokens are chosen from: of its vocabulary, by the processors that it knows."""
    return distribution.over(scorer.vocabulary, scorer.reads_processors)


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
