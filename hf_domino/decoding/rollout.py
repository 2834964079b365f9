"""Rollout: the sequential corrections that turn draft hidden states into proposals.

Proposal i is chosen from base_i + W2 activate(part_i, state), where the state of the correction head has read the
anchor and the i proposals before. The head takes one step per token; the block is never run again. Proposals are
chosen among the `draft_pool_size` likeliest tokens of each position, chance included, where the draft law allows it,
else among all that are drafted. Logits and scores are those of the draft vocabulary's columns; proposals are ids.

Shapes: B batch, P proposals, R low rank, H hidden size, M candidates per position, V tokens of the target, D of the
draft vocabulary, which is V without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from hf_domino.decoding.correcting.candidates import CandidatePool, fits_pool
from hf_domino.decoding.correcting.corrections import Corrections
from hf_domino.decoding.correcting.fused import choose_fused, fits_kernels
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.noise.steps import DraftNoise, OwnNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, choose
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel

# Told of each proposal in turn: its scores `[B, M]`, and ids `[B, M]` or None for all tokens.
Listener = Callable[[torch.Tensor, torch.Tensor | None], None]
AnyNoise = TypeVar("AnyNoise", torch.Tensor | None, DraftNoise | None)
EXACT_POOL_SIZE = 128  # candidates to guess from where the whole vocabulary is chosen from


def rollout(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
    noise: DraftNoise | None = None,
    table: InputTable | None = None,
    listener: Listener | None = None,
    is_fixed: bool = False,
) -> torch.Tensor:
    """Choose the proposals of one block.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, P, H]`.
        prefixes ([`Prefixes`]): Tokens so far, the anchor last.
        law ([`TokenLaw`]): What drafts are chosen from.
        noise (`torch.Tensor` or [`OwnNoise`], *optional*): Drafts are drawn with it: standard exponential, `[B, P, V]`
            or of more positions. Without it they are the likeliest tokens.
        table ([`InputTable`], *optional*): Products of the generation's earlier rounds.
        listener (`Callable`, *optional*): Told of each proposal; then they are chosen one after the other.
        is_fixed (`bool`, *optional*, defaults to `False`): Whether to read nothing back, so that it can be captured:
            then the whole vocabulary is gone through for every position.

    Returns:
        `torch.Tensor`: Ids `[B, P]`.
    """
    base_logits, law, noise = over_drafted(drafter, target, draft_hidden, prefixes, law, noise)
    block = _Block(base_logits, prefixes, law, noise, listener)
    if not (drafter.has_correction_head or law.needs_prefix):
        return block.choose_independently()
    size, anchors = drafter.config.draft_pool_size, prefixes.last()[:, 0]
    shared = None if isinstance(noise, OwnNoise) else noise
    if listener is None and shared is noise and fits_kernels(drafter, law, base_logits, shared):
        temperature = None if shared is None else law.temperature
        return choose_fused(drafter, target, draft_hidden, base_logits, anchors, noise=shared, temperature=temperature)
    pool, num_candidates = None, size or EXACT_POOL_SIZE
    # A guess can be checked where the check draws with its noise.
    can_check = shared is noise and not is_fixed and listener is None
    is_guessing = fits_pool(law, num_candidates) and (can_check or size is not None)
    if is_guessing and num_candidates < base_logits.shape[2]:
        pool = CandidatePool(base_logits, num_candidates, law, prefixes, shared)
    if drafter.has_correction_head:
        candidates = None if pool is None else pool.columns
        block.corrections = Corrections(drafter, target, draft_hidden, anchors, candidates, table)
    if pool is None or size is not None:
        return block.choose_in_order(block.no_tokens, pool)
    return block.choose_and_check(pool)


def over_drafted(
    drafter: DominoDraftModel,
    target: TargetModel,
    draft_hidden: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
    noise: AnyNoise,
) -> tuple[torch.Tensor, TokenLaw, AnyNoise]:
    """Base logits `[B, P, D]`, law and noise of the tokens that are drafted; the arguments are those of [`rollout`]."""
    vocabulary = drafter.vocabulary
    base_logits = drafter.kind.logits(target, draft_hidden.to(prefixes.ids.device))
    if (head := drafter.head) is not None:
        base_logits = head.narrow(base_logits)
    base_logits, law = law.over(vocabulary).settled(prefixes, base_logits)
    if isinstance(noise, torch.Tensor):
        noise = vocabulary.gather(noise[:, : base_logits.shape[1]])
    return base_logits, law, noise


@dataclass
class _Block:
    """Scores and noise that the proposals of a block are chosen by; the fields are those of [`rollout`]."""

    base_logits: torch.Tensor
    prefixes: Prefixes
    law: TokenLaw
    noise: DraftNoise | None
    listener: Listener | None
    corrections: Corrections | None = None

    @property
    def no_tokens(self) -> torch.Tensor:
        """Ids `[B, 0]`."""
        return self.prefixes.ids[:, :0]

    def _choose(self, index: int, scores: torch.Tensor, pool: CandidatePool | None = None) -> torch.Tensor:
        """Take a token `[B, N]` at each position from this one on, by scores `[B, N, D]`, or `[B, N, M]` of a pool."""
        here, noise = slice(index, index + scores.shape[1]), self.noise
        if isinstance(noise, OwnNoise):
            noise = noise.like(scores)
        elif noise is not None:
            noise = noise[:, here] if pool is None else noise[:, here].gather(2, pool.columns[:, here])
        choice = choose(scores, noise)
        if pool is None:
            return self.law.vocabulary.ids(choice)
        return pool.token_ids[:, here].gather(2, choice[..., None])[..., 0]

    def _tell(self, scores: torch.Tensor, candidates: torch.Tensor | None = None) -> None:
        if self.listener is not None:
            self.listener(scores, self.law.vocabulary.all_ids(len(scores)) if candidates is None else candidates)

    def choose_independently(self) -> torch.Tensor:
        """All positions at once, which do not depend on each other."""
        scores = self.law.scores(self.prefixes, self.base_logits, self.no_tokens)
        for here in scores.unbind(dim=1):
            self._tell(here)
        return self._choose(0, scores)

    def choose_in_order(self, tokens: torch.Tensor, pool: CandidatePool | None = None) -> torch.Tensor:
        """Go on from the proposals `[B, N]` chosen so far, each from the candidates of its position or all tokens."""
        base_logits = self.base_logits if pool is None else pool.logits
        for index in range(tokens.shape[1], base_logits.shape[1]):
            logits = base_logits[:, index]
            if self.corrections is not None:
                logits = self.corrections.apply(index, logits)
            if pool is None:
                scores, candidates = self.law.scores(self.prefixes, logits[:, None], tokens), None
            else:
                scores, candidates = pool.scores(logits, tokens)[:, None], pool.token_ids[:, index]
            tokens = torch.cat((tokens, self._choose(index, scores, pool)), dim=1)
            self._tell(scores[:, 0], candidates)
            if self.corrections is not None and index + 1 < base_logits.shape[1]:
                self.corrections.read(tokens[:, -1])
        return tokens

    def choose_and_check(self, pool: CandidatePool) -> torch.Tensor:
        """Choose from all tokens: guess by the pool, check all guesses at once, go on behind the first miss."""
        tokens = self.no_tokens
        while True:
            num_checked = tokens.shape[1]
            tokens = self.choose_in_order(tokens, pool)
            length = tokens.shape[1]
            logits = self.base_logits[:, :length]
            if self.corrections is not None:
                logits = self.corrections.apply_to_all(logits)
            scores = self.law.scores(self.prefixes, logits, tokens[:, :-1])
            choice = self._choose(0, scores)
            missed = (choice != tokens)[:, num_checked:].any(dim=0).nonzero()
            count = num_checked + int(missed[0]) + 1 if len(missed) else length
            tokens = torch.cat((tokens[:, :num_checked], choice[:, num_checked:count]), dim=1)
            if count == length:
                return tokens
            if self.corrections is not None:
                self.corrections.forget(count - 1)
                self.corrections.read(tokens[:, -1])
