"""The distribution of the next token: logits after `generate`'s processors, and how a token is taken from them.

The target and the drafter use the same class, so that the logits of both are processed in the same way, each position
with its own prefix.

Shapes: B sequences, N positions of each, R positions of all sequences, M candidates, V vocabulary, D tokens of a draft
vocabulary (D is V without one).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property, partial
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
)

from hf_domino.decoding.constraints import allows, remembering
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors import (
    CHECKS_DISTRIBUTION,
    PREFIX_FREE,
    STATELESS,
    Banned,
    Effect,
    Holder,
    effect_of,
    one_by_one,
)
from hf_domino.decoding.scores import Scores
from hf_domino.decoding.stopping import KnownStops
from hf_domino.methods.vocabulary import DraftVocabulary


class TokenDistribution:
    """The distribution that `generate` samples from, or takes the most likely token of.

    Args:
        processors (`LogitsProcessorList`): Processors and warpers, in order.
        stops ([`KnownStops`], *optional*): Where texts end. A caller's function is never called for a text that has
            ended.
    """

    def __init__(self, processors: LogitsProcessorList, stops: KnownStops | None = None):
        self.stops = stops or KnownStops()
        self.vocabulary = DraftVocabulary()  # the tokens that have logits
        # The processors in order, each replaced by its effect if it has one.
        self.steps: list[Effect | LogitsProcessor] = [effect_of(each) or remembering(each) for each in processors]

    @cached_property
    def processors(self) -> list[Any]:
        """The processors and warpers, in order."""
        return [step.processor if isinstance(step, Effect) else step for step in self.steps]

    @cached_property
    def effects(self) -> list[Effect]:
        """The effects of those processors that have one."""
        return [step for step in self.steps if isinstance(step, Effect)]

    @property
    def temperature(self) -> float:
        """The product of all temperatures; 1 if there are none."""
        product = 1.0
        for one in self.processors:
            if type(one) is TemperatureLogitsWarper:
                product *= float(one.temperature)
        return product

    @cached_property
    def constraints(self) -> list[PrefixConstrainedLogitsProcessor]:
        """The processors that call a caller's `prefix_allowed_tokens_fn`."""
        return [one for one in self.processors if type(one) is PrefixConstrainedLogitsProcessor]

    @cached_property
    def needs_prefix(self) -> bool:
        """Whether the scores of a position depend on the tokens before it."""
        return any(type(processor) not in PREFIX_FREE for processor in self.processors)

    @property
    def may_keep_state(self) -> bool:
        """Whether a processor may keep state, so that it must be called once for each committed position, in order."""
        return bool(stateful_processors(self.processors))

    def without_state(self) -> TokenDistribution:
        """The same distribution without the processors that may keep state; drafts are chosen from it.

        Without these processors, fewer drafts are accepted, but the output is still the target's own.
        """
        kept = zip(self.steps, self.processors, strict=True)
        return self._with(steps=[step for step, processor in kept if type(processor) in STATELESS])

    def over(self, vocabulary: DraftVocabulary, types: tuple[type, ...] | None = None) -> TokenDistribution:
        """The same distribution for a draft vocabulary: its logits and scores are `[..., D]`.

        Args:
            vocabulary (`DraftVocabulary`): The draft vocabulary.
            types (`tuple[type, ...]`, *optional*): The types of processors to keep. Defaults to all.
        """
        # Some warpers raise an error if all tokens are forbidden, which can happen in a reduced vocabulary.
        kept = zip(self.steps, self.processors, strict=True)
        steps = [
            step
            for step, processor in kept
            if (types is None or type(processor) in types)
            and not (vocabulary.is_reduced and type(processor) in CHECKS_DISTRIBUTION)
        ]
        return self._with(vocabulary=vocabulary, steps=steps)

    def _with(self, **changed: Any) -> TokenDistribution:
        distribution = copy.copy(self)
        for name in ("processors", "effects", "constraints", "needs_prefix"):  # they depend on the steps
            vars(distribution).pop(name, None)
        vars(distribution).update(changed)
        return distribution

    @property
    def key(self) -> Hashable | None:
        """The parameters that a captured function depends on.

        None if no function with this distribution can be captured, because it copies results to the host or calls a
        function of the caller.
        """
        parts: list[Hashable] = []
        for step in self.steps:
            if isinstance(step, Effect):
                parts.append(step.key)
            elif type(step) in PREFIX_FREE and type(step) not in CHECKS_DISTRIBUTION:  # the latter wait for the device
                parts.append((type(step), *sorted(vars(step).items())))
            else:
                parts.append(None)
        if None in parts:
            return None
        return tuple(parts)

    def hold(self, hold: Holder) -> None:
        """Copy the tensors of the effects to places where captured functions find them."""
        for index, effect in enumerate(self.effects):
            name = f"distribution {index} {type(effect.processor).__name__}"
            effect.hold(partial(_hold_field, hold, name))

    def settled(self, prefixes: Prefixes, logits: torch.Tensor) -> tuple[torch.Tensor, TokenDistribution]:
        """Apply in advance the processors that forbid tokens by the length of the text alone.

        Args:
            prefixes ([`Prefixes`]): The tokens so far of B sequences.
            logits (`torch.Tensor`): Logits `[B, N, D]` of the next N positions, which are not modified.

        Returns:
            `tuple`: Logits that can still be corrected, and the distribution without the processors that were applied.
        """
        if not (done := [step for step in self.steps if isinstance(step, Banned)]):
            return logits, self
        seen = prefixes.foreseen(logits.shape[1])
        changed: Scores | None = None
        for step in done:
            if (where := step.where(seen)) is not None:
                changed = changed or Scores(self.vocabulary.scatter(logits).flatten(0, 1), logits.dtype)
                step.act(changed, where)
        if changed is not None:
            logits = self.vocabulary.gather(changed.tensor).view_as(logits)
        return logits, self._with(steps=[step for step in self.steps if not isinstance(step, Banned)])

    def scores(
        self, prefixes: Prefixes, logits: torch.Tensor, seen_by_each: Callable[[], Prefixes] | None = None
    ) -> torch.Tensor:
        """Process the logits of positions, each with its own prefix.

        Args:
            prefixes ([`Prefixes`]): The text that all N positions of a sequence see, B texts.
            logits (`torch.Tensor`): Logits `[B, N, D]`.
            seen_by_each (`Callable`, *optional*): Returns the text that each position sees, B * N texts, if positions
                of a sequence see different texts.

        Returns:
            `torch.Tensor`: Scores `[B, N, D]` in fp32.
        """
        if not self.needs_prefix:
            return self.process(logits.flatten(0, 1), prefixes).view_as(logits)
        # Processors that look at tokens use the target's ids, so they need the whole vocabulary.
        seen = seen_by_each() if seen_by_each else prefixes
        all_logits = self.vocabulary.scatter(logits)
        # Transformers' own processors accept every prefix. A caller's trie or grammar may not.
        is_open: list[bool] | None = None
        if self.constraints:
            goes_on = self.stops.are_open(prefixes.lengths, seen)
            is_open = [on and not lacks for on, lacks in zip(goes_on, self.unanswerable(prefixes, seen), strict=True)]
        return self.vocabulary.gather(self.process(all_logits.flatten(0, 1), seen, is_open=is_open)).view_as(logits)

    def unanswerable(self, prefixes: Prefixes, seen: Prefixes) -> list[bool]:
        """Which unfinished texts have no answer: a caller's function forbids one of their tokens or cannot handle them.

        Args:
            prefixes ([`Prefixes`]): The committed tokens of B sequences.
            seen ([`Prefixes`]): Texts that continue them, equally many for each sequence, beginning with those of the
                first one.
        """
        goes_on = self.stops.are_open(prefixes.lengths, seen)
        per_row = len(seen.lengths) // len(prefixes.lengths)
        lacking = list[bool]()
        for index, on in enumerate(goes_on):
            start = prefixes.lengths[index // per_row]
            text = seen.ids[index, : seen.lengths[index]]
            lacking.append(on and not all(allows(one, seen.rows[index], text, start) for one in self.constraints))
        return lacking

    def process(
        self,
        scores: torch.Tensor,
        prefixes: Prefixes,
        changeable: Callable[[torch.Tensor], Scores] = Scores,
        is_open: list[bool] | None = None,
    ) -> torch.Tensor:
        """Process the scores of R positions.

        Args:
            scores (`torch.Tensor`): Scores `[R, V]`, or `[R, M]` of candidates, which are not modified.
            prefixes ([`Prefixes`]): The text that each position sees.
            changeable (`Callable`, *optional*): Creates the copy that effects change. By default, the copy has the
                scores of all tokens.
            is_open (`list[bool]`, *optional*): The positions at which to call processors that must be called one
                position at a time. Defaults to all positions.

        Returns:
            `torch.Tensor`: The processed scores in fp32.
        """
        changed: Scores | None = None  # the copy that consecutive effects share
        for step in self.steps:
            if isinstance(step, Effect):
                changed = changed or changeable(scores)
                step.apply(changed, prefixes)
                scores = changed.tensor
            else:
                alone = type(step) not in PREFIX_FREE
                changed = None
                scores = scores.float()
                if alone:
                    scores = one_by_one(step, scores, prefixes, is_open)
                else:
                    scores = step(prefixes.ids, scores)
        return scores.float()


def _hold_field(hold: Holder, effect: str, name: str, values: torch.Tensor) -> torch.Tensor:
    return hold(f"{effect} {name}", values)


def stateful_processors(processors: Iterable[LogitsProcessor]) -> list[str]:
    """The class names of the processors that may keep state: all except those that are known not to."""
    return [type(processor).__name__ for processor in processors if type(processor) not in STATELESS]


def choose(scores: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Take a token `[...]` from processed scores `[..., V]`: the most likely one, or the one that the noise draws.

    With noise, the token is a draw from the softmax of the scores. It is bit for bit the token that
    `torch.multinomial(probs, 1)` would draw with the same noise, but without its host synchronisation.

    Args:
        scores (`torch.Tensor`): Scores `[..., V]` in fp32, or those of candidates.
        noise (`torch.Tensor`, *optional*): Standard exponential noise of the same shape. Without it, the most likely
            token is taken.
    """
    if noise is None:
        return scores.argmax(dim=-1)
    return sample(scores, noise).indices


def sample(scores: torch.Tensor, noise: torch.Tensor) -> torch.return_types.max:
    """Draw tokens `[...]`; return them with their probability over noise, which is NaN if no token can be drawn."""
    return (scores.softmax(dim=-1) / noise).max(dim=-1)
