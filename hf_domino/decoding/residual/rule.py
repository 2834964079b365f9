"""The rule that accepts most: by the ratio of both probabilities, and on rejection a draw from what is left.

Exact in law for any drafts (arXiv 2211.17192, 2302.01318, 2403.10444), but the text is not the one that plain
`generate` writes from the same seed, and what is drawn depends on the drafter.

Shapes: R rows still generated, P proposals, V vocabulary, M candidates of a position.
"""

from __future__ import annotations

import torch

from hf_domino.configuration import DominoConfig
from hf_domino.decoding.noise.steps import OwnNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.block import accept_block
from hf_domino.decoding.rollout import Listener
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import Judgement, check_drawn


class ResidualRule:
    """The rule of one call where the target samples; see [`CoupledRule`] for what it is asked.

    All is drawn from the default generator.

    Args:
        law ([`TokenLaw`]): The target's.
        draws_drafts (`bool`): Whether proposals are drawn from the draft's own law, or are the likeliest.
    """

    def __init__(self, law: TokenLaw, draws_drafts: bool):
        self._law, self._draws_drafts = law, draws_drafts
        self._vocab_size = 0
        self._laws: list[torch.Tensor] = []  # scores [R, V] that each proposal was drawn from
        self.draft_noise = OwnNoise() if draws_drafts else None

    @classmethod
    def of_call(cls, config: DominoConfig, law: TokenLaw, do_sample: bool) -> ResidualRule | None:
        """The rule of a call, if its drafter's configuration asks for this one and the target samples."""
        is_wanted = do_sample and config.acceptance_rule == "residual"
        return cls(law, draws_drafts=config.draft_law != "greedy") if is_wanted else None

    def begin(self, prefixes: Prefixes, vocab_size: int) -> None:
        """The first token of all rows is about to be chosen."""
        self._vocab_size = vocab_size

    def begin_round(self, prefixes: Prefixes, most: int) -> None:
        """A round of at most so many proposals begins."""
        self._laws = []

    @property
    def listener(self) -> Listener | None:
        """Keeps the law of each proposal, where they are drawn."""
        return self._keep if self._draws_drafts else None

    def _keep(self, scores: torch.Tensor, candidates: torch.Tensor | None) -> None:
        if candidates is not None:  # no other can be drawn
            nowhere = scores.new_full((len(scores), self._vocab_size), -torch.inf)
            scores = nowhere.scatter(1, candidates, scores)
        self._laws.append(scores)

    @property
    def draft_scores(self) -> torch.Tensor | None:
        """Scores `[R, P, V]` that the round's proposals were drawn from; None if they were not drawn."""
        return torch.stack(self._laws, dim=1) if self._laws else None

    def judge(self, prefixes: Prefixes, chain: Tree, logits: torch.Tensor) -> Judgement:
        """Verify the round's proposals `[R, P]`, a chain, from the target's logits `[R, P + 1, V]`."""
        proposals = chain.tokens
        scores = self._law.scores(prefixes, logits, proposals)
        num_accepted, bonus = verify(proposals, self.draft_scores, scores)
        accepted = num_accepted[:, None]
        tokens = torch.cat((proposals, bonus[:, None]), dim=1).scatter(1, accepted.clamp_min(0), bonus[:, None])
        return Judgement(scores, torch.cat((accepted + 1, tokens), dim=1))

    def choose(self, index: int, proposals: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The token `[R, 1]` at one position of the round, from the target's processed scores `[R, 1, V]`."""
        drafted = proposals[:, index : index + 1]
        draft_scores = self._laws[index][:, None] if index < len(self._laws) else None
        num_accepted, bonus = verify(drafted, draft_scores, scores.expand(-1, drafted.shape[1] + 1, -1))
        check_drawn(bool((num_accepted >= 0).all()))
        if not drafted.shape[1]:
            return bonus[:, None]
        return torch.where(num_accepted > 0, drafted[:, 0], bonus)[:, None]

    def end(self, num_steps: int) -> None:
        """The call ends."""


def verify(
    proposals: torch.Tensor, draft_scores: torch.Tensor | None, target_scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept a prefix of the proposals and draw the bonus token.

    Args:
        proposals (`torch.Tensor`): `[R, P]`.
        draft_scores (`torch.Tensor`, *optional*): Scores `[R, P, V]` whose softmax they were drawn from; None if each
            was a certainty.
        target_scores (`torch.Tensor`): The target's processed scores `[R, P + 1, V]`, for each proposal and after all.

    Returns:
        `tuple`: Accepted proposals per row, `[R]` in `[0, P]`, or -1 where no token can be drawn after them, and the
        target's own token there, `[R]`.
    """
    target_probs = target_scores.softmax(dim=-1)
    draft_probs = _draft_probs(proposals, draft_scores, target_probs.shape[-1])
    uniforms = torch.rand(proposals.shape, dtype=torch.float32, device=proposals.device)
    num_accepted, weights = accept_block(proposals, target_probs, draft_probs, uniforms)
    values, bonus = (weights / OwnNoise().like(weights)).max(dim=-1)
    return num_accepted.masked_fill(values.isnan(), -1), bonus


def _draft_probs(proposals: torch.Tensor, draft_scores: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """The law of the drafts `[R, P, V]`; a proposal without scores was certain."""
    if draft_scores is not None:
        return draft_scores.softmax(dim=-1)
    certain = torch.zeros(*proposals.shape, vocab_size, dtype=torch.float32, device=proposals.device)
    return certain.scatter(2, proposals[..., None], 1.0)  # unlike one_hot, it reads nothing back
