"""Verification: how many proposals are accepted, and the target's own next token.

Greedy accepts while a proposal is the target's most likely token. Sampling is the rule of speculative sampling
(arXiv 2211.17192, 2302.01318): accept with min(1, p/q), and draw from max(p - q, 0) on rejection, which is exact for
any q. Here p is `target_probs` and q `draft_probs`.

Shapes: B batch, P proposals, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import DraftProposal
from hf_domino.decoding.sampling import TokenLaw, sample


@dataclass(frozen=True)
class Verification:
    """Outcome of one round.

    Args:
        num_accepted (`torch.Tensor`): Accepted proposals per row, `[B]`, in `[0, P]`.
        bonus (`torch.Tensor`): The target's own token after them, `[B]`.
    """

    num_accepted: torch.Tensor
    bonus: torch.Tensor

    @property
    def acceptance_length(self) -> torch.Tensor:
        """Tokens gained per target forward, `[B]`: accepted proposals and the bonus token."""
        return self.num_accepted + 1


@dataclass(frozen=True)
class Judgement:
    """A round's outcome, and what it was decided from.

    Args:
        scores (`torch.Tensor`): The target's processed scores `[B, P + 1, V]`.
        outcome (`torch.Tensor`): Per row how many tokens are committed, then the tokens: `[B, 1 + P + 1]` int64, where
            what stands behind the bonus token is anything. Everything the host must know, to be read at once.
    """

    scores: torch.Tensor
    outcome: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """Accepted proposals and the bonus token, `[B, P + 1]`."""
        return self.outcome[:, 1:]


def judge(law: TokenLaw, prefixes: Prefixes, proposal: DraftProposal, logits: torch.Tensor) -> Judgement:
    """Verify a round from the target's logits, without a synchronisation.

    Args:
        law ([`TokenLaw`]): The target's.
        prefixes ([`Prefixes`]): Tokens so far of the B rows.
        proposal ([`DraftProposal`]): P proposals per row.
        logits (`torch.Tensor`): `[B, P + 1, V]`.

    Returns:
        [`Judgement`]: Still on the device.
    """
    scores = law.scores(prefixes, logits, proposal.tokens)
    verification = verify(proposal, scores, law.do_sample)
    accepted = verification.num_accepted[:, None]
    tokens = torch.cat((proposal.tokens, verification.bonus[:, None]), dim=1)  # [B, P + 1]
    tokens = tokens.scatter(1, accepted, verification.bonus[:, None])
    return Judgement(scores, torch.cat((accepted + 1, tokens), dim=1))


def verify(proposal: DraftProposal, target_scores: torch.Tensor, do_sample: bool) -> Verification:
    """Accept a prefix of the proposal and choose the bonus token.

    Args:
        proposal ([`DraftProposal`]): P proposals per row.
        target_scores (`torch.Tensor`): The target's processed scores `[B, P + 1, V]`, for each proposal and after all.
        do_sample (`bool`): Whether the target samples.

    Returns:
        [`Verification`]: Committed tokens are the accepted proposals and the bonus token.
    """
    if not do_sample:
        chosen = target_scores.argmax(dim=-1)  # [B, P + 1]
        num_accepted = _leading_run(proposal.tokens == chosen[:, :-1])
        return Verification(num_accepted, chosen.gather(1, num_accepted[:, None])[:, 0])
    target_probs = target_scores.float().softmax(dim=-1)
    draft_probs = _draft_probs(proposal, target_probs.shape[-1])
    drafted = proposal.tokens[..., None]
    target_at, draft_at = target_probs[:, :-1].gather(2, drafted)[..., 0], draft_probs.gather(2, drafted)[..., 0]
    # u < p/q without the division: a proposal the target forbids (p = 0) is never accepted, whatever u and q.
    num_accepted = _leading_run(torch.rand_like(target_at) * draft_at < target_at)
    return Verification(num_accepted, sample(_bonus_law(target_probs, draft_probs, num_accepted)))


def _leading_run(accepted: torch.Tensor) -> torch.Tensor:
    """Length `[B]` of the leading run of True in `[B, P]`."""
    return accepted.long().cumprod(dim=1).sum(dim=1)


def _draft_probs(proposal: DraftProposal, vocab_size: int) -> torch.Tensor:
    """The law of the drafts `[B, P, V]`; a proposal without scores was certain."""
    if proposal.scores is not None:
        return proposal.scores.float().softmax(dim=-1)
    certain = torch.zeros(*proposal.tokens.shape, vocab_size, device=proposal.tokens.device)
    return certain.scatter(2, proposal.tokens[..., None], 1.0)  # unlike one_hot, it reads nothing back


def _bonus_law(target_probs: torch.Tensor, draft_probs: torch.Tensor, num_accepted: torch.Tensor) -> torch.Tensor:
    """Unnormalised law `[B, V]` of the bonus token: the residual where a proposal was rejected, else the target's."""
    rows = torch.arange(target_probs.shape[0], device=target_probs.device)
    at_stop = target_probs[rows, num_accepted]
    # After full acceptance there is no draft to subtract: a row of zeros stands behind the last one.
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    residual = (at_stop - padded[rows, num_accepted]).clamp_min(0.0)
    # p = q up to rounding leaves nothing: the rejection itself was rounding, and p is the law to draw from.
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, at_stop)
