"""The residual acceptance rule, for who wants more tokens a round and not plain generation's text.

A proposal is accepted by the ratio of both probabilities, and on rejection a token is drawn from what is left. Exact in
law for any drafts (arXiv 2211.17192, 2302.01318, 2403.10444), but the text is not the one that plain `generate` writes
from the same seed, and what is drawn depends on the drafter.

Blocks are verified as a whole. The rule for single tokens accepts each with min(1, p/q), and its first rejection ends
the round. Here (arXiv 2403.10444, algorithm 2) a later token that q gave too seldom makes up for an earlier one that it
gave too often. With w_0 = 1 and w_i = min(w_{i-1} p(x_i) / q(x_i), 1), what is left behind i proposals is r_i =
max(w_i p - q, 0), of mass |r_i|. Those i stand with h_i = |r_i| / (|r_i| + 1 - w_i), all P of them with w_P, each count
by a uniform of its own. The longest run that stands is accepted, and the bonus token is drawn from its r_i, or from p
behind all P.

So i proposals or more are accepted with w_i, never less than the product of min(1, p/q), and the text has the target's
law with rounds that know nothing of each other. How many are drafted may depend on those drafted before.
Here p is `target_probs`, q `draft_probs`.

Shapes: R rows still generated, P proposals, V vocabulary, M candidates of a position.
"""

from __future__ import annotations

import torch

from hf_domino.configuration import DominoConfig
from hf_domino.decoding.noise import DraftNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree import Tree
from hf_domino.decoding.verification import Rule, Verification, check_drawn


class ResidualRule(Rule):
    """Accepts by the ratio of probabilities, and draws from the default generator."""

    is_coupled = False

    def __init__(self, law: TokenLaw, draws_drafts: bool):
        # Proposals are drawn from the draft's own law, or are the likeliest.
        super().__init__(law, do_sample=False)
        self._vocab_size, self._draws_drafts = 0, draws_drafts
        self._laws: list[torch.Tensor] = []  # scores [R, N, V] that proposals were drawn from, one behind the other

    @classmethod
    def of_call(cls, config: DominoConfig, law: TokenLaw, do_sample: bool) -> ResidualRule | None:
        """Make the rule of a call, if its drafter's configuration asks for this one and the target samples."""
        is_wanted = do_sample and config.acceptance_rule == "residual"
        return cls(law, draws_drafts=config.draft_law != "greedy") if is_wanted else None

    def begin(self, prefixes: Prefixes, vocab_size: int) -> None:
        """See [`Rule`]."""
        self._vocab_size = vocab_size

    def begin_round(self, prefixes: Prefixes, most: int) -> None:
        """See [`Rule`]."""
        self._laws = []

    @property
    def draft_noise(self) -> DraftNoise | None:
        """See [`Rule`]; where proposals are drawn, their law is kept when they are."""
        return self._draw if self._draws_drafts else None

    def _draw(self, scores: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        nowhere = scores.new_full((*scores.shape[:2], self._vocab_size), -torch.inf)  # no other token can be drawn
        self._laws.append(nowhere.scatter(2, candidates, scores))
        return exponential_like(scores)

    def verify(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> Verification:
        """See [`Rule`]; the proposals are a chain."""
        drafted, scores = proposals.tokens, self.law.scores(prefixes, logits, proposals.tokens)
        num_accepted, bonus = accept(drafted, torch.cat(self._laws, dim=1) if self._laws else None, scores)
        accepted, bonus = num_accepted[:, None], bonus[:, None]
        tokens = torch.cat((drafted, bonus), dim=1).scatter(1, accepted.clamp_min(0), bonus)
        return Verification(scores, torch.cat((accepted + 1, tokens), dim=1))

    def choose(self, index: int, proposals: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See [`Rule`]."""
        drafted = proposals[:, index : index + 1]
        draft_scores = torch.cat(self._laws, dim=1)[:, index : index + 1] if self._laws else None
        num_accepted, bonus = accept(drafted, draft_scores, scores.expand(-1, drafted.shape[1] + 1, -1))
        check_drawn(bool((num_accepted >= 0).all()))
        if not drafted.shape[1]:
            return bonus[:, None]
        return torch.where(num_accepted > 0, drafted[:, 0], bonus)[:, None]


def accept(
    proposals: torch.Tensor,  # [R, P]
    draft_scores: torch.Tensor | None,  # whose softmax they were drawn from, [R, P, V]; None if each was certain
    target_scores: torch.Tensor,  # for each proposal and after all, [R, P + 1, V]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the accepted proposals of each row, and draw the bonus token; the count is -1 where none can be drawn."""
    target_probs = target_scores.softmax(dim=-1)
    if draft_scores is not None:
        draft_probs = draft_scores.softmax(dim=-1)
    else:
        draft_probs = torch.zeros_like(target_probs[:, :-1]).scatter(2, proposals[..., None], 1.0)
    uniforms = torch.rand(proposals.shape, dtype=torch.float32, device=proposals.device)
    num_accepted, weights = accept_block(proposals, target_probs, draft_probs, uniforms)
    values, bonus = (weights / exponential_like(weights)).max(dim=-1)
    return num_accepted.masked_fill(values.isnan(), -1), bonus


def exponential_like(values: torch.Tensor) -> torch.Tensor:
    """Draw standard exponential noise of a tensor's shape."""
    return torch.empty_like(values).exponential_()


def accept_block(
    proposals: torch.Tensor,  # [R, P], drawn from `draft_probs`
    target_probs: torch.Tensor,  # the target's law for each proposal and after all, [R, P + 1, V]
    draft_probs: torch.Tensor,  # the law of the drafts, one of certainty for a greedy draft, [R, P, V]
    uniforms: torch.Tensor,  # independent, in [0, 1), [R, P]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the leading proposals that are accepted, `[R]`; the bonus token's law `[R, V]` is unnormalised."""
    rows, num_drafted = torch.arange(len(proposals), device=proposals.device), proposals.shape[1]
    # Nothing is drafted behind the last proposal: a row of zeros, behind which all of w_P p is left.
    padded = torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))
    weights = prefix_weights(proposals, target_probs, draft_probs)
    residuals = (weights[..., None] * target_probs - padded).clamp_min(0.0)  # [B, P + 1, V]
    left = residuals.sum(dim=-1)  # behind each count of proposals, [B, P + 1]
    left = torch.where(left.isnan(), weights, left)  # behind the text's end: no law, nothing is accepted there
    # That they stand if no longer run of them does; 0 / 0: p = q and w = 1, a longer run stands anyway.
    chances = (left / (left + (1 - weights))).nan_to_num(nan=1.0)
    lengths = torch.arange(1, num_drafted + 1, device=proposals.device)
    stands = torch.nn.functional.pad((uniforms < chances[:, 1:]) * lengths, (1, 0))  # no proposals always stand
    num_accepted = stands.amax(dim=1)
    residual, at_stop = residuals[rows, num_accepted], target_probs[rows, num_accepted]
    # p = q up to rounding leaves nothing: stopping here was rounding itself, and p is the law to draw from.
    return num_accepted, torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, at_stop)


def prefix_weights(proposals: torch.Tensor, target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """Give the probability that each count of leading proposals, or more, is accepted: w_0 to w_P, `[R, P + 1]`."""
    index = proposals[..., None]
    target_at, draft_at = target_probs[:, :-1].gather(2, index)[..., 0], draft_probs.gather(2, index)[..., 0]
    ratios = (target_at / draft_at).nan_to_num(nan=0.0)  # a row of NaN is no law: nothing from it on is accepted
    # The product held at 1 from above is a walk of logarithms, less how far its highest point so far is above 0.
    walk = torch.nn.functional.pad(ratios.log().cumsum(dim=1), (1, 0))
    return (walk - walk.cummax(dim=1).values).exp()
