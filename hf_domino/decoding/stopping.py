"""The stops that are known without calling a stopping criterion: end-of-text tokens and the length limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_domino.decoding.prefixes import Prefixes

KNOWN_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)  # subclasses may ask for more


@dataclass(frozen=True)
class KnownStops:
    """The stops of those stopping criteria that need not be called.

    Args:
        eos_token_ids (`frozenset[int]`, *optional*): The tokens that end a text.
        max_length (`int`, *optional*): The length at which a text ends, including the prompt. Defaults to no limit.
        limits (`tuple[MaxLengthCriteria, ...]`, *optional*): The criteria that set the limit. They also warn if a text
            becomes longer than the target's number of positions.
    """

    eos_token_ids: frozenset[int] = frozenset()
    max_length: int | None = None
    limits: tuple[MaxLengthCriteria, ...] = field(default=(), compare=False)

    @classmethod
    def among(cls, criteria: StoppingCriteriaList) -> KnownStops:
        """Collect the known stops among the criteria that `generate` prepared. Other criteria must be called."""
        ends = [c.eos_token_id.flatten() for c in criteria if type(c) is EosTokenCriteria]
        limits = tuple(c for c in criteria if type(c) is MaxLengthCriteria)
        shortest = min((limit.max_length for limit in limits), default=None)
        return cls(frozenset(torch.cat(ends).tolist() if ends else ()), shortest, limits)

    def warn(self, input_ids: torch.Tensor) -> None:
        """Let the criteria warn, once per message, of a text too long for the target, as in plain `generate`.

        Args:
            input_ids (`torch.Tensor`): The text so far, `[1, T]`.
        """
        for limit in self.limits:
            if input_ids.shape[1] > (limit.max_position_embeddings or math.inf):
                limit(input_ids, None)

    def stops_at(self, length: int, token_id: int) -> bool:
        """Whether a text of this length, prompt included, ends with this token."""
        return token_id in self.eos_token_ids or (self.max_length is not None and length >= self.max_length)

    def room(self, length: int) -> int | None:
        """How many proposals fit after a text of this length if a bonus token follows them; None for no limit."""
        if self.max_length is None:
            return None
        return max(self.max_length - length - 1, 0)

    def are_open(self, lengths: Sequence[int], seen: Prefixes) -> list[bool]:
        """Which texts have not ended.

        Args:
            lengths (`Sequence[int]`): The number of committed tokens of each of the B sequences.
            seen ([`Prefixes`]): Texts that continue them, equally many for each sequence, beginning with those of the
                first one.
        """
        per_row = len(seen.lengths) // len(lengths)
        first = min(lengths)
        starts = [length for length in lengths for _ in range(per_row)]
        texts = zip(starts, seen.lengths, seen.ids[:, first:].tolist(), strict=True)
        return [self._is_open(start, tokens[start - first : end - first]) for start, end, tokens in texts]

    def _is_open(self, length: int, tokens: Sequence[int]) -> bool:
        """Whether an unfinished text of this length is still unfinished after these tokens."""
        is_full = self.max_length is not None and length + len(tokens) >= self.max_length
        return not tokens or not (is_full or self.eos_token_ids.intersection(tokens))
