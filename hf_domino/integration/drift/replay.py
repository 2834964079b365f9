"""The returned tokens once more, one at a time: what the target alone says at each of them.

Transformers' own sampling loop runs with two processors more: one compares the raw law with the one of the verification
forward, the other notes what the target would have chosen and then forces the returned token.

Shapes: B batch, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.noise.generators import CallGenerator
from hf_domino.decoding.processors.stock import STATELESS

# Functions of the tokens alone: a replay can ask them again. Others may look at the clock or remember.
REPEATABLE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, StopStringCriteria)


@dataclass(frozen=True)
class ReplayedRow:
    """One row of a batch, replayed up to where the target alone stops.

    Args:
        tokens (`list[int]`): All that was returned for it, N.
        chosen (`list[int]`): What the target alone chooses after each prefix of them, N.
        margins (`list[float]`): By how much it prefers that to the returned token, in processed logits, N.
        scales (`list[float]`): Largest raw logit by magnitude, N.
        kl (`list[float]`): KL(target alone, verification) of the raw laws in nats, N.
        length (`int`): How many of these say something about the row; padding follows.
        end (`int`, *optional*): Where it must end, in new tokens; None if the target alone would go on, or if that
            cannot be told.
        end_is_known (`bool`): Whether `end` can be told.
        pad (`int`, *optional*): What may stand behind the end; None for nothing.
    """

    tokens: list[int]
    chosen: list[int]
    margins: list[float]
    scales: list[float]
    kl: list[float]
    length: int
    end: int | None
    end_is_known: bool
    pad: int | None


class Replay:
    """All that is needed to run a call again, copied before it runs: caches and stateful processors are used up.

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.Tensor`): Prompts `[B, T]`.
        logits_processor (`LogitsProcessorList`): The call's.
        stopping_criteria (`StoppingCriteriaList`): The call's.
        generation_config (`GenerationConfig`): The call's.
        model_kwargs: The call's cache, attention mask, positions and model-specific inputs.
    """

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

    def run(
        self, sequences: torch.Tensor, logits: Sequence[torch.Tensor], draws: Draws | None = None
    ) -> list[ReplayedRow]:
        """Feed the returned tokens to the target one at a time.

        Args:
            sequences (`torch.Tensor`): Prompts and new tokens as returned, `[B, T + N]`.
            logits (`Sequence[torch.Tensor]`): The raw logits that the new tokens were chosen from, N of `[B, V]`.
            draws ([`Draws`], *optional*): What the target alone draws with; None to take the likeliest tokens.

        Returns:
            `list[ReplayedRow]`: One per row.
        """
        start = self.input_ids.shape[1]
        # What keeps state cannot be asked twice.
        can_ask_again = all(type(processor) in STATELESS for processor in self.processors)
        again = LogitsProcessorList(self.processors) if can_ask_again else None
        laws = _CompareLaws(logits, start)
        follow = _Follow(sequences, laws, draws, again)
        device = sequences.device
        with _without_drawing(device), torch.no_grad():
            self.model._sample(
                self.input_ids,
                LogitsProcessorList([laws, *self.processors, follow]),
                StoppingCriteriaList([MaxLengthCriteria(sequences.shape[1])]),
                self.config,
                **self.kwargs,
            )
        return self._rows(sequences, laws, follow)

    def _rows(self, sequences: torch.Tensor, laws: _CompareLaws, follow: _Follow) -> list[ReplayedRow]:
        start, num_new = self.input_ids.shape[1], sequences.shape[1] - self.input_ids.shape[1]
        columns = [
            torch.stack(steps[:num_new], dim=1) for steps in (follow.chosen, follow.margins, laws.scales, laws.kl)
        ]
        stops = [self._stop(row, start) for row in sequences]
        pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        end_is_known = all(type(criterion) in REPEATABLE_CRITERIA for criterion in self.criteria)
        pad = int(self.pad) if self.pad is not None and pads_finished and len(stops) > 1 else None
        # Without an end-of-text token plain generation goes on with all rows until the last one has stopped.
        last = None if None in stops else max(stop or 0 for stop in stops)
        rows = []
        for index, stop in enumerate(stops):
            tokens, end = sequences[index, start:].tolist(), stop if pads_finished else last
            chosen, margins, scales, kl = (column[index].tolist() for column in columns)
            length = min(end or num_new, num_new)
            if not end_is_known:
                length = min(length, _unpadded(tokens, pad))
            rows.append(ReplayedRow(tokens, chosen, margins, scales, kl, length, end, end_is_known, pad))
        return rows

    def _stop(self, ids: torch.Tensor, start: int) -> int | None:
        """After how many new tokens `[T + N]` must stop by the criteria that can be asked again; None for never."""
        found: list[int] = []
        for criterion in self.criteria:
            if type(criterion) is EosTokenCriteria:
                ends = torch.isin(ids[start:], criterion.eos_token_id.to(ids.device)).nonzero()
                found += (ends[:1, 0] + 1).tolist()
            elif type(criterion) is MaxLengthCriteria and len(ids) >= criterion.max_length:
                found.append(max(criterion.max_length - start, 1))
            elif type(criterion) is StopStringCriteria:
                lengths = range(1, len(ids) - start + 1)
                found += [n for n in lengths if bool(criterion(ids[None, : start + n], None))][:1]
        return min(found, default=None)


def _unpadded(tokens: list[int], pad: int | None) -> int:
    """How many tokens there are before the padding at the end."""
    return max((position for position, token in enumerate(tokens, start=1) if token != pad), default=0)


class _CompareLaws(LogitsProcessor):
    """Sees raw logits first of all: notes KL(these, verification) `[B]` of each step, and their scale.

    Verification's logits of one step, and the largest distance from them, are those of a text of that length.
    """

    def __init__(self, logits: Sequence[torch.Tensor], start: int):
        self.logits, self.start = logits, start
        self.kl: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self._alone: torch.Tensor | None = None  # raw logits [B, V] of the last step

    def verified(self, length: int) -> torch.Tensor:
        """Verification's raw logits `[B, V]` of the step behind a text of this length."""
        return self.logits[length - self.start].float()

    def distances(self, length: int) -> torch.Tensor:
        """Largest difference between them and the last step's, `[B]`."""
        assert self._alone is not None
        return torch.nan_to_num(self._alone - self.verified(length), nan=0.0).abs().amax(dim=-1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step, self._alone = input_ids.shape[1] - self.start, scores
        if step < len(self.logits):
            alone = scores.cpu().double().log_softmax(dim=-1)
            verified = self.logits[step].cpu().double().log_softmax(dim=-1)
            terms = torch.where(alone > -torch.inf, alone.exp() * (alone - verified), 0.0)
            self.kl.append(terms.sum(dim=-1).clamp_min(0.0))
            finite = torch.where(scores.isfinite(), scores.abs(), 0.0)
            self.scales.append(finite.amax(dim=-1).cpu())
        return scores


@contextmanager
def _without_drawing(device: torch.device) -> Iterator[None]:
    """Leave the default generator as it is, whatever a processor draws, and to no other call the same numbers."""
    call = CallGenerator(device, is_watching=False)
    start = call.generator.get_state()
    try:
        yield
    finally:
        call.give_back(start)


class Draws:
    """The noise that plain generation draws with, step by step.

    Args:
        state (`torch.Tensor`): Of the generator before the first step.
        device (`torch.device`): Where tokens are drawn.
    """

    def __init__(self, state: torch.Tensor, device: torch.device):
        self._generator = torch.Generator(device)
        self._generator.set_state(state)

    def next(self, scores: torch.Tensor) -> torch.Tensor:
        """The next step's noise: added to scores `[B, V]`, the largest sum is what `torch.multinomial` draws."""
        return -torch.empty_like(scores).exponential_(generator=self._generator).log()


class _Follow(LogitsProcessor):
    """Sees processed scores last of all: notes the target's choices and margins `[B]`, forces the returned token."""

    def __init__(
        self, sequences: torch.Tensor, laws: _CompareLaws, draws: Draws | None, again: LogitsProcessorList | None
    ):
        self.sequences, self.laws, self.draws, self.again = sequences, laws, draws, again
        self.chosen: list[torch.Tensor] = []
        self.margins: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        if length >= self.sequences.shape[1]:  # a loop that learns one step late that it is over
            return scores
        tokens = self.sequences[:, length, None]  # [B, 1]
        noise = torch.zeros_like(scores) if self.draws is None else self.draws.next(scores)
        best = (scores + noise).max(dim=-1)
        self.chosen.append(best.indices.cpu())
        margins = best.values - (scores + noise).gather(1, tokens)[:, 0]
        if self.again is not None and margins.isinf().any():
            # Forbidden here, and yet what verification's own logits lead to: how far those are away is what decides.
            verified = self.again(input_ids, self.laws.verified(length)) + noise
            is_theirs = verified.argmax(dim=-1) == tokens[:, 0]
            margins = torch.where(margins.isinf() & is_theirs, self.laws.distances(length), margins)
        self.margins.append(margins.cpu())
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
