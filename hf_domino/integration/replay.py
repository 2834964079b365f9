"""The returned tokens once more, one at a time: what the target alone says at each of them.

Transformers' own sampling loop runs with two processors more: the first sees the raw logits, the last notes what the
target would have chosen and then forces the returned token.

Shapes: B batch, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.noise import CallGenerator
from hf_domino.decoding.processors import STATELESS
from hf_domino.target.view import rounded_to

# Functions of the tokens alone: a replay can ask them again. Others may look at the clock or remember.
REPEATABLE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)
# Units in the last place of the largest logit. Measured in bf16: margins up to half of one behind twelve layers; deeper
# targets round more.
TIE_ROUNDINGS = 4


@dataclass(frozen=True)
class Mismatch:
    """The first token of a row that the target alone would not have written."""

    call: int  # number of the assisted call inside the block, from 0
    row: int  # of its batch
    position: int  # of the new token, from 0
    token: int | None = None  # the returned one; None where the row ended too early
    expected: int | None = None  # of the target alone; None where a row ends in the wrong place
    # By how much the target alone prefers its token, in processed logits, the noise of the draw included; infinite
    # where the row ended in the wrong place or the token was forbidden.
    margin: float = float("inf")
    tie: float = 0.0  # margins up to this are roundings of the target's dtype

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it; otherwise suspect a bug."""
        return self.margin <= self.tie

    def __str__(self) -> str:
        place = f"call {self.call}, row {self.row}, new token {self.position}"
        if self.token is None:
            return f"{place}: the row ended, the target alone goes on. NO TIE: suspect a bug"
        if self.expected is None:
            return f"{place}: returned {self.token}, where the target alone has stopped. NO TIE: suspect a bug"
        cause = "a tie" if self.is_tie else "NO TIE: suspect a bug"
        return (
            f"{place}: returned {self.token}, target alone {self.expected}, margin {self.margin:.3g} "
            f"({cause}; rounding reaches {self.tie:.2g})"
        )


class Replay:
    """Run a call again; all that it needs is copied before the call, which uses up caches and stateful processors."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ):
        self.model, self.input_ids, self.criteria = model, input_ids, stopping_criteria
        self.processors = [p if type(p) in STATELESS else copy.deepcopy(p) for p in logits_processor]
        self.kwargs = model_kwargs | {CACHE: copy.deepcopy(model_kwargs.get(CACHE))}
        self.config = copy.copy(generation_config)
        self.config.do_sample = self.config.return_dict_in_generate = False
        self.pad = getattr(generation_config, "_pad_token_tensor", None)
        self._start = input_ids.shape[1]
        # Of each step and row [B]: the target's choice, its margin over the returned token, the largest raw logit by
        # magnitude.
        self._chosen: list[torch.Tensor] = []
        self._margins: list[torch.Tensor] = []
        self._scales: list[torch.Tensor] = []

    def run(self, sequences: torch.Tensor, logits: Sequence[torch.Tensor], draws: torch.Generator | None) -> None:
        """Feed the returned tokens to the target one at a time."""
        # `sequences` [B, T + N]; raw `logits` of the new tokens, N of [B, V]; `draws` as it was before the call drew,
        # or None to take the likeliest tokens.
        self._sequences, self._logits, self._draws = sequences, logits, draws
        with _without_drawing(sequences.device), torch.no_grad():
            self.model._sample(
                self.input_ids,
                LogitsProcessorList([self._see, *self.processors, self._follow]),
                StoppingCriteriaList([MaxLengthCriteria(sequences.shape[1])]),
                self.config,
                **self.kwargs,
            )

    def rows(self, call: int) -> Iterator[tuple[int, Mismatch | None]]:
        """Give for each replayed row its tokens compared, and its first mismatch."""
        num_new = self._sequences.shape[1] - self._start
        columns = [
            torch.stack(steps[:num_new], dim=1).tolist() for steps in (self._chosen, self._margins, self._scales)
        ]
        stops = [self._stop(row) for row in self._sequences]
        pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        end_is_known = all(type(criterion) in REPEATABLE_CRITERIA for criterion in self.criteria)
        pad = int(self.pad) if self.pad is not None and pads_finished and len(stops) > 1 else None
        # Without an end-of-text token plain generation goes on with all rows until the last one has stopped.
        last = None if None in stops else max(stop or 0 for stop in stops)
        rounding = TIE_ROUNDINGS * torch.finfo(rounded_to(self.model)).eps
        for row, (chosen, margins, scales) in enumerate(zip(*columns, strict=True)):
            tokens = self._sequences[row, self._start :].tolist()
            real = [position for position, token in enumerate(tokens) if token != pad]
            end = stops[row] if pads_finished else last
            length = min(end or num_new, num_new)
            if not end_is_known:
                length = min(length, max(real, default=-1) + 1)
            wrong = next((at for at in range(length) if tokens[at] != chosen[at]), None)
            surplus = next((at for at in real if end is not None and at >= end), None)
            mismatch = None
            if wrong is not None:
                tie = rounding * scales[wrong]
                mismatch = Mismatch(call, row, wrong, tokens[wrong], chosen[wrong], margins[wrong], tie)
            elif end_is_known and end is None:
                mismatch = Mismatch(call, row, num_new)
            elif end_is_known and surplus is not None:
                mismatch = Mismatch(call, row, surplus, tokens[surplus])
            yield length, mismatch

    def _see(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See raw logits `[B, V]` before all processors."""
        self._alone = scores
        self._scales.append(torch.where(scores.isfinite(), scores.abs(), 0.0).amax(dim=-1).cpu())
        return scores

    def _follow(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See processed scores `[B, V]` behind all processors, and force the returned token."""
        length = input_ids.shape[1]
        if length >= self._sequences.shape[1]:  # the loop may learn one step late that it is over
            return scores
        tokens, noise = self._sequences[:, length, None], torch.zeros_like(scores)  # [B, 1], [B, V]
        if self._draws is not None:  # added to scores, the largest sum is what `torch.multinomial` draws
            noise = -torch.empty_like(scores).exponential_(generator=self._draws).log()
        best = (scores + noise).max(dim=-1)
        margins = best.values - (scores + noise).gather(1, tokens)[:, 0]
        if margins.isinf().any() and all(type(processor) in STATELESS for processor in self.processors):
            # Forbidden here, and yet the choice by verification's logits: the distance of these logits decides.
            raw = self._logits[length - self._start].float()
            verified = LogitsProcessorList(self.processors)(input_ids, raw) + noise
            is_theirs = verified.argmax(dim=-1) == tokens[:, 0]
            distances = torch.nan_to_num(self._alone - raw, nan=0.0).abs().amax(dim=-1)
            margins = torch.where(margins.isinf() & is_theirs, distances, margins)
        self._chosen.append(best.indices.cpu())
        self._margins.append(margins.cpu())
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)

    def _stop(self, ids: torch.Tensor) -> int | None:
        """Count the new tokens of a row `[T + N]` at which the repeatable criteria stop it; None for never."""
        asked = [criterion for criterion in self.criteria if type(criterion) in REPEATABLE_CRITERIA]
        texts = enumerate((ids[None, :end] for end in range(self._start + 1, len(ids) + 1)), 1)
        return next((count for count, text in texts if any(bool(criterion(text, None)) for criterion in asked)), None)


@contextmanager
def _without_drawing(device: torch.device) -> Iterator[None]:
    """Leave the default generator as it is, whatever a processor draws, and to no other call the same numbers."""
    call = CallGenerator(device, is_watching=False)
    start = call.generator.get_state()
    try:
        yield
    finally:
        call.give_back(start)
