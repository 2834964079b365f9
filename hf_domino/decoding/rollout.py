"""Rollout: the sequential corrections that turn draft hidden states into a draft proposal.

Domino (arXiv 2605.29707): proposal i is chosen from base_i + W2 SiLU(W_z z + W_s state), where the prefix state has
read the anchor and the i proposals before. The GRU takes one step per token; the block is never run again. Proposals
are chosen among the `draft_pool_size` likeliest tokens of each position where the draft law allows it, else among all.

Shapes: B batch, P proposals, R low rank, H hidden size, M candidates per position, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_domino.decoding.correcting.candidates import CandidatePool, fits_pool
from hf_domino.decoding.correcting.corrections import Corrections
from hf_domino.decoding.correcting.fused import choose_fused, fits_kernels
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target import TargetModel

GoesOn = Callable[[int, torch.Tensor], bool]  # of a proposal's index and scores
EXACT_POOL_SIZE = 128  # candidates to guess from where the whole vocabulary is chosen from


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
    table: InputTable | None = None,
    goes_on: GoesOn | None = None,
    is_fixed: bool = False,
) -> DraftProposal:
    """Choose the proposals of one block.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head, if it has one.
        target ([`TargetModel`]): Gives embeddings and lm_head.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, P, H]`.
        prefixes ([`Prefixes`]): Tokens so far, the anchor last.
        law ([`TokenLaw`]): What drafts are chosen from.
        table ([`InputTable`], *optional*): Products of the generation's earlier rounds.
        goes_on (`Callable`, *optional*): Told index and scores `[B, V]` of each proposal, of all tokens or of the
            candidates; where it says no, that proposal is the last. An index that comes again takes back what it was
            told of it and of later ones.
        is_fixed (`bool`, *optional*, defaults to `False`): Whether to read nothing back, so that it can be captured:
            then the whole vocabulary is gone through for every position.

    Returns:
        [`DraftProposal`]: P tokens per row, or fewer.
    """
    base_logits, law = law.settled(prefixes, target.logits(draft_hidden.to(prefixes.ids.device)))
    if not (drafter.has_correction_head or law.needs_prefix):
        scores = law.scores(prefixes, base_logits, prefixes.ids[:, :0])
        scores = scores[:, : _length(scores, goes_on)]
        return DraftProposal(law.choose(scores), scores if law.do_sample else None)
    size, anchors = drafter.config.draft_pool_size, prefixes.last()[:, 0]
    if goes_on is None and fits_kernels(drafter, law, base_logits):
        return DraftProposal(choose_fused(drafter, target, draft_hidden, base_logits, anchors), None)
    pool, num_candidates = None, size or EXACT_POOL_SIZE
    is_guessing = fits_pool(law, num_candidates) and not (is_fixed and size is None)
    if is_guessing and num_candidates < base_logits.shape[2]:
        pool = CandidatePool(base_logits, num_candidates, law, prefixes)
    corrections = None
    if drafter.has_correction_head:
        candidates = None if pool is None else pool.token_ids
        corrections = Corrections(drafter, target, draft_hidden, anchors, candidates, table)
    if pool is None:
        return _choose_one_by_one(base_logits, prefixes, law, corrections, goes_on)
    if size is None:
        return _choose_and_check(pool, base_logits, prefixes, law, corrections, goes_on)
    tokens, all_scores = _choose_from_pool(pool, prefixes.ids[:, :0], law, corrections, goes_on)
    return DraftProposal(tokens, pool.spread(torch.stack(all_scores, dim=1)) if law.do_sample else None)


def _length(scores: torch.Tensor, goes_on: GoesOn | None) -> int:
    """How many of the positions `[B, P, V]`, which do not depend on each other, are worth proposing."""
    stops = (
        index + 1 for index in range(scores.shape[1]) if goes_on is not None and not goes_on(index, scores[:, index])
    )
    return next(stops, scores.shape[1])


def _choose_from_pool(
    pool: CandidatePool,
    tokens: torch.Tensor,
    law: TokenLaw,
    corrections: Corrections | None,
    goes_on: GoesOn | None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Go on from the proposals `[B, N]` chosen so far, each from the candidates of its position.

    Returns:
        `tuple`: All proposals `[B, P]`, or fewer, and the scores `[B, M]` of each of the new ones.
    """
    all_scores = []
    for index in range(tokens.shape[1], pool.num_positions):
        logits = pool.logits[:, index]
        if corrections is not None:
            logits = corrections.apply(index, logits)
        scores, candidates = pool.scores(logits, tokens), pool.token_ids[:, index]
        choice = law.choose(scores, None if noise is None else noise[:, index].gather(1, candidates))
        tokens = torch.cat((tokens, candidates.gather(1, choice[:, None])), dim=1)
        all_scores.append(scores)
        if (goes_on is not None and not goes_on(index, scores)) or index + 1 == pool.num_positions:
            break
        if corrections is not None:
            corrections.read(tokens[:, -1])
    return tokens, all_scores


def _choose_and_check(
    pool: CandidatePool,
    base_logits: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
    corrections: Corrections | None,
    goes_on: GoesOn | None,
) -> DraftProposal:
    """Choose from the whole vocabulary: guess by the pool, check all guesses at once, go on behind the first miss.

    The tokens are those of position by position; what is sampled is coupled by drawing the noise first.
    """
    noise = torch.empty_like(base_logits).exponential_() if law.do_sample else None
    tokens = prefixes.ids[:, :0]
    while True:
        num_checked = tokens.shape[1]
        tokens, _ = _choose_from_pool(pool, tokens, law, corrections, goes_on, noise)
        length = tokens.shape[1]
        logits = base_logits[:, :length]
        if corrections is not None:
            logits = corrections.apply_to_all(logits)
        scores = law.scores(prefixes, logits, tokens[:, :-1])
        choice = law.choose(scores, None if noise is None else noise[:, :length])
        missed = (choice != tokens)[:, num_checked:].any(dim=0).nonzero()
        count = num_checked + int(missed[0]) + 1 if len(missed) else length
        tokens = torch.cat((tokens[:, :num_checked], choice[:, num_checked:count]), dim=1)
        if count == length:
            return DraftProposal(tokens, scores if law.do_sample else None)
        if corrections is not None:
            corrections.forget(count - 1)
            corrections.read(tokens[:, -1])


def _choose_one_by_one(
    base_logits: torch.Tensor,
    prefixes: Prefixes,
    law: TokenLaw,
    corrections: Corrections | None,
    goes_on: GoesOn | None,
) -> DraftProposal:
    """Choose from the whole vocabulary, position by position, as processors that no pool can stand for need it."""
    tokens, all_scores = prefixes.ids[:, :0], []
    noise = torch.empty_like(base_logits).exponential_() if law.do_sample else None
    for index in range(base_logits.shape[1]):
        logits = base_logits[:, index]
        if corrections is not None:
            if index:
                corrections.read(tokens[:, -1])
            logits = corrections.apply(index, logits)
        scores = law.scores(prefixes, logits[:, None], tokens)
        choice = law.choose(scores, None if noise is None else noise[:, index : index + 1])
        tokens = torch.cat((tokens, choice), dim=1)
        if law.do_sample:
            all_scores.append(scores)
        if goes_on is not None and not goes_on(index, scores[:, 0]):
            break
    return DraftProposal(tokens, torch.cat(all_scores, dim=1) if all_scores else None)
