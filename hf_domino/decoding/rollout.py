"""Rollout: the sequential corrections that turn draft hidden states into a draft proposal.

Domino (arXiv 2605.29707): proposal i is chosen from base_i + W2 SiLU(W_z z + W_s state), where the prefix state has
read the anchor and the i proposals before. The GRU takes one step per token; the block is never run again. Proposals
are chosen among the `draft_pool_size` likeliest tokens of each position where the draft law allows it, else among all.

Shapes: B batch, P proposals, R low rank, H hidden size, M candidates per position, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_domino.decoding.candidates import CandidatePool, fits_pool
from hf_domino.decoding.sampling import Prefixes, TokenLaw
from hf_domino.modeling import DominoDraftModel
from hf_domino.target import TargetModel


@dataclass(frozen=True)
class DraftProposal:
    """Proposed tokens and the law they were drawn from.

    Args:
        tokens (`torch.Tensor`): Ids `[B, P]`.
        scores (`torch.Tensor`, *optional*): Scores `[B, P, V]` whose softmax they were drawn from; None if each is the
            most likely token of its law, which is then a certainty.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None


def rollout(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
) -> DraftProposal:
    """Choose the proposals of one block.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, P, H]`.
        prefixes ([`Prefixes`]): Tokens so far, the anchor last.
        law ([`TokenLaw`]): What drafts are chosen from.

    Returns:
        [`DraftProposal`]: P tokens per row.
    """
    base_logits = target.logits(draft_hidden.to(prefixes.ids.device))
    if not (drafter.has_correction_head or law.needs_prefix):
        scores = law.scores(prefixes, base_logits, prefixes.ids[:, :0])
        return DraftProposal(law.choose(scores), scores if law.do_sample else None)
    corrections = _Corrections(drafter, target, draft_hidden) if drafter.has_correction_head else None
    size = drafter.config.draft_pool_size or base_logits.shape[2]
    if size < base_logits.shape[2] and fits_pool(law.processors):
        return _choose_from_pool(CandidatePool(base_logits, size, law.processors, prefixes), prefixes, law, corrections)
    return _choose_from_vocabulary(base_logits, prefixes, law, corrections)


class _Corrections:
    """Corrections of successive positions, one GRU step each."""

    def __init__(self, drafter: DominoDraftModel, target: TargetModel, draft_hidden: torch.Tensor):
        self.target, self.gru, self.projection = target, drafter.prefix_gru, drafter.embed_proj
        self.first_corrected = drafter.config.pure_draft_prefix_len
        self.block_part = self.projection.project_hidden(draft_hidden)  # [B, P, R], once
        self.state = self.gru.initial_state(draft_hidden.shape[0])

    def read(self, token_ids: torch.Tensor) -> None:
        """Advance the prefix state by the tokens `[B]`."""
        embeds = self.target.embed(token_ids).to(self.state)
        self.state = self.gru.step(embeds, self.state)

    def apply(self, index: int, base_logits: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Corrected logits of proposal `index`; base logits before the first corrected one.

        Args:
            index (`int`): Which proposal.
            base_logits (`torch.Tensor`): Its base logits, `[B, V]` or those of M candidates `[B, M]`.
            rows (`torch.Tensor`, *optional*): The candidates' rows of W2, `[B, M, R]`; None for all.
        """
        if index < self.first_corrected:
            return base_logits
        low_rank = self.block_part[:, index] + self.projection.project_state(self.state)
        return base_logits + self.projection.expand(low_rank, rows).to(base_logits)


def _choose_from_pool(
    pool: CandidatePool, prefixes: Prefixes, law: TokenLaw, corrections: _Corrections | None
) -> DraftProposal:
    token = prefixes.last()[:, 0]
    tokens, all_scores = [], []
    rows = None if corrections is None else corrections.projection.rows(pool.token_ids)  # [B, P, M, R]
    for index in range(pool.token_ids.shape[1]):
        logits = pool.logits[:, index]
        if corrections is not None and rows is not None:
            corrections.read(token)
            logits = corrections.apply(index, logits, rows[:, index])
        scores = pool.scores(index, logits)
        token = pool.take(index, law.choose(scores))
        tokens.append(token)
        all_scores.append(scores)
    return DraftProposal(
        torch.stack(tokens, dim=1), pool.spread(torch.stack(all_scores, dim=1)) if law.do_sample else None
    )


def _choose_from_vocabulary(
    base_logits: torch.Tensor, prefixes: Prefixes, law: TokenLaw, corrections: _Corrections | None
) -> DraftProposal:
    token = prefixes.last()  # [B, 1]
    tokens, all_scores = token[:, :0], []
    for index in range(base_logits.shape[1]):
        logits = base_logits[:, index]
        if corrections is not None:
            corrections.read(token[:, 0])
            logits = corrections.apply(index, logits)
        scores = law.scores(prefixes, logits[:, None], tokens)
        token = law.choose(scores)
        tokens = torch.cat((tokens, token), dim=1)
        if law.do_sample:
            all_scores.append(scores)
    return DraftProposal(tokens, torch.cat(all_scores, dim=1) if all_scores else None)
