"""Candidate pools: drafts chosen among the likeliest tokens of each position instead of the whole vocabulary.

A correction moves the likely tokens among each other; it hardly ever lifts one from far below. So only the tokens with
the highest base logits are corrected. What is drawn is drawn from the pool's own law, which verification is given:
drafts change a little, the output does not.

Shapes: B rows, P proposals, M candidates per position, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from hf_domino.decoding.sampling import PREFIX_FREE, Prefixes


class CandidatePool:
    """The candidates of one block, and what the draft law makes of their logits.

    Args:
        base_logits (`torch.Tensor`): `[B, P, V]`.
        size (`int`): Candidates per position (M), the likeliest.
        processors (`Sequence[LogitsProcessor]`): The draft law's, which must pass [`fits_pool`].
        prefixes ([`Prefixes`]): Tokens so far of the B rows.
    """

    def __init__(self, base_logits: torch.Tensor, size: int, processors: Sequence[LogitsProcessor], prefixes: Prefixes):
        self._processors, self._vocab_size = processors, base_logits.shape[2]
        self.logits, self.token_ids = base_logits.topk(size, dim=2)  # [B, P, M]
        self._in_prefix: torch.Tensor | None = None  # [B, P, M], whether a candidate is in the prefix
        for processor in processors:
            if type(processor) not in PREFIX_FREE:
                ids = _counted_ids(prefixes, getattr(processor, "prompt_ignore_length", None))
                in_prefix = torch.zeros_like(base_logits[:, 0], dtype=torch.bool).scatter(1, ids, True)
                self._in_prefix = in_prefix.gather(1, self.token_ids.flatten(1)).view_as(self.token_ids)
        self._seen = self._in_prefix  # the same with the proposals so far

    @property
    def num_positions(self) -> int:
        """Positions of the block (P)."""
        return self.token_ids.shape[1]

    def scores(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """Process the logits `[B, M]` of position `index`."""
        for processor in self._processors:
            if type(processor) in PREFIX_FREE:
                logits = processor(self.token_ids[:, index], logits)
            else:
                penalty = processor.penalty
                penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
                assert self._seen is not None
                logits = torch.where(self._seen[:, index], penalised, logits)
        return logits

    def take(self, index: int, choice: torch.Tensor) -> torch.Tensor:
        """Token ids `[B]` of the chosen candidates `[B]` of position `index`; they count as prefix from then on."""
        token_ids = self.token_ids[:, index].gather(1, choice[:, None])
        if self._seen is not None:
            self._seen = self._seen | (self.token_ids == token_ids[..., None])
        return token_ids[:, 0]

    def retake(self, token_ids: torch.Tensor) -> None:
        """Go back to where only these proposals `[B, N]`, of the pool or not, count as prefix."""
        if self._in_prefix is not None:
            self._seen = self._in_prefix | (self.token_ids[..., None] == token_ids[:, None, None]).any(dim=-1)

    def spread(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[B, P, M]` of the first P positions as ones of all tokens, `[B, P, V]`: no other can be drawn."""
        token_ids = self.token_ids[:, : scores.shape[1]]
        return scores.new_full((*scores.shape[:2], self._vocab_size), -torch.inf).scatter(2, token_ids, scores)


def _counted_ids(prefixes: Prefixes, ignored: torch.Tensor | int | None) -> torch.Tensor:
    """Ids `[B, T]` of the prefixes without the first `ignored` ones, of all rows or per row: the last one instead."""
    ids = prefixes.filled(prefixes.ids[:, :0], 0)[:, 0]
    if ignored is None:
        return ids
    start = ignored[prefixes.rows, None] if isinstance(ignored, torch.Tensor) and ignored.dim() else ignored
    return torch.where(torch.arange(ids.shape[1], device=ids.device) < start, prefixes.last(), ids)


def fits_pool(processors: Sequence[LogitsProcessor]) -> bool:
    """Whether processors can be applied to a few tokens of the vocabulary alone, or nearly so."""
    others = [type(processor) for processor in processors if type(processor) not in PREFIX_FREE]
    return others in ([], [RepetitionPenaltyLogitsProcessor])
