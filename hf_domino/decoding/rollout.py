"""Rollout: the sequential corrections that turn draft hidden states into a draft proposal.

Domino (arXiv 2605.29707): proposal i is chosen from base_i + W2 SiLU(W_z z + W_s state), where the prefix state has
read the anchor and the i proposals before. The GRU takes one step per token; the block is never run again.

Shapes: B batch, T tokens so far, P proposals, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_domino.decoding.sampling import TokenLaw
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
    prefix_ids: torch.Tensor,
    law: TokenLaw,
) -> DraftProposal:
    """Choose the proposals of one block.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, P, H]`.
        prefix_ids (`torch.Tensor`): Tokens so far, the anchor last, `[B, T]`.
        law ([`TokenLaw`]): What drafts are chosen from.

    Returns:
        [`DraftProposal`]: P tokens per row.
    """
    base_logits = target.logits(draft_hidden.to(prefix_ids.device))
    if drafter.has_correction_head:
        return _choose_one_by_one(base_logits, prefix_ids, law, _Corrections(drafter, target, draft_hidden))
    if law.needs_prefix:
        return _choose_one_by_one(base_logits, prefix_ids, law, None)
    scores = law.scores(prefix_ids, base_logits, prefix_ids[:, :0])
    return DraftProposal(law.choose(scores), scores if law.do_sample else None)


class _Corrections:
    """Corrections of successive positions, one GRU step each."""

    def __init__(self, drafter: DominoDraftModel, target: TargetModel, draft_hidden: torch.Tensor):
        self.target, self.gru, self.projection = target, drafter.prefix_gru, drafter.embed_proj
        self.first_corrected = drafter.config.pure_draft_prefix_len
        self.low_rank = self.projection.project_hidden(draft_hidden)  # [B, P, R], the block's part, once
        self.state = self.gru.initial_state(draft_hidden.shape[0])

    def read(self, token_ids: torch.Tensor) -> None:
        """Advance the prefix state by the tokens `[B]`."""
        embeds = self.target.embed(token_ids).to(self.state)
        self.state = self.gru.step(embeds, self.state)

    def at(self, index: int) -> torch.Tensor | float:
        """Corrections `[B, V]` of proposal `index`, or 0 before the first corrected one."""
        if index < self.first_corrected:
            return 0.0
        return self.projection.expand(self.low_rank[:, index] + self.projection.project_state(self.state))


def _choose_one_by_one(
    base_logits: torch.Tensor, prefix_ids: torch.Tensor, law: TokenLaw, corrections: _Corrections | None
) -> DraftProposal:
    token, tokens, all_scores = prefix_ids[:, -1], [], []
    for index in range(base_logits.shape[1]):
        logits = base_logits[:, index]
        if corrections is not None:
            corrections.read(token)
            correction = corrections.at(index)
            logits = logits + (correction.to(logits) if isinstance(correction, torch.Tensor) else correction)
        scores = law.scores(prefix_ids, logits[:, None], prefix_ids[:, :0])[:, 0]
        token = law.choose(scores)
        tokens.append(token)
        if law.do_sample:
            all_scores.append(scores)
        if law.needs_prefix:
            prefix_ids = torch.cat((prefix_ids, token[:, None]), dim=1)
    return DraftProposal(torch.stack(tokens, dim=1), torch.stack(all_scores, dim=1) if all_scores else None)
