"""Rollout: the sequential corrections that turn draft hidden states into a draft proposal.

Domino (arXiv 2605.29707): proposal i is chosen from base_i + W2 SiLU(W_z z + W_s state), where the prefix state has
read the anchor and the i proposals before. The GRU takes one step per token; the block is never run again.

Shapes: B batch, P proposals, R low rank, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    if drafter.has_correction_head:
        return _choose_one_by_one(base_logits, prefixes, law, _Corrections(drafter, target, draft_hidden))
    if law.needs_prefix:
        return _choose_one_by_one(base_logits, prefixes, law, None)
    scores = law.scores(prefixes, base_logits, prefixes.ids[:, :0])
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

    def apply(self, index: int, base_logits: torch.Tensor) -> torch.Tensor:
        """Corrected logits `[B, 1, V]` of proposal `index`; base logits before the first corrected one."""
        if index < self.first_corrected:
            return base_logits
        low_rank = self.low_rank[:, index] + self.projection.project_state(self.state)
        return base_logits + self.projection.expand(low_rank)[:, None].to(base_logits)


def _choose_one_by_one(
    base_logits: torch.Tensor, prefixes: Prefixes, law: TokenLaw, corrections: _Corrections | None
) -> DraftProposal:
    token = prefixes.last()  # [B, 1]
    tokens, all_scores = token[:, :0], []
    for index in range(base_logits.shape[1]):
        logits = base_logits[:, index : index + 1]
        if corrections is not None:
            corrections.read(token[:, 0])
            logits = corrections.apply(index, logits)
        scores = law.scores(prefixes, logits, tokens)
        token = law.choose(scores)
        tokens = torch.cat((tokens, token), dim=1)
        if law.do_sample:
            all_scores.append(scores)
    return DraftProposal(tokens, torch.cat(all_scores, dim=1) if all_scores else None)
