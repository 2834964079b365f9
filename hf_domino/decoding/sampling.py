"""The distribution of the next token: logits after `generate`'s processors, and how a token is taken from them.

Target and drafts go through the same class, so that both are processed alike, each position with its own prefix.

Shapes: B rows, N positions, R positions of all rows, V vocabulary, D tokens of a draft vocabulary; D is V without one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from functools import partial
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
        stops ([`KnownStops`], *optional*): Where texts end: a caller's function is never asked what comes behind.
    """

    def __init__(self, processors: LogitsProcessorList, stops: KnownStops | None = None):
        self.stops = stops or KnownStops()
        self.vocabulary = DraftVocabulary()  # whose tokens have logits
        # The processors in order, those that have an effect as that.
        self.steps: list[Effect | LogitsProcessor] = [effect_of(each) or remembering(each) for each in processors]

    @property
    def processors(self) -> list[Any]:
        """Processors and warpers, in order."""
        return [step.processor if isinstance(step, Effect) else step for step in self.steps]

    @property
    def effects(self) -> list[Effect]:
        """Those of its processors that touch a few tokens."""
        return [step for step in self.steps if isinstance(step, Effect)]

    @property
    def temperature(self) -> float:
        """The product of its temperatures; 1 without any."""
        product = 1.0
        for one in self.processors:
            if type(one) is TemperatureLogitsWarper:
                product *= float(one.temperature)
        return product

    @property
    def constraints(self) -> list[PrefixConstrainedLogitsProcessor]:
        """Those of its processors that ask a function of the caller's what may follow a text."""
        return [one for one in self.processors if type(one) is PrefixConstrainedLogitsProcessor]

    @property
    def needs_prefix(self) -> bool:
        """Whether scores of a position depend on the tokens before it."""
        return any(type(processor) not in PREFIX_FREE for processor in self.processors)

    @property
    def may_keep_state(self) -> bool:
        """Whether a processor may remember its calls, so that it must see each committed position once, in order."""
        return bool(stateful_processors(self.processors))

    def without_state(self) -> TokenDistribution:
        """The same distribution, less the processors that may keep state: drafts are chosen from that.

        Without those fewer drafts are accepted; the output is the target's own all the same.
        """
        kept = zip(self.steps, self.processors, strict=True)
        return self._with(steps=[step for step, processor in kept if type(processor) in STATELESS])

    def over(self, vocabulary: DraftVocabulary) -> TokenDistribution:
        """The same distribution where only some tokens have logits: it takes and gives those `[..., D]`."""
        # All of these may be forbidden, which some warpers refuse.
        kept = zip(self.steps, self.processors, strict=True)
        steps = [
            step for step, processor in kept if not (vocabulary.is_reduced and type(processor) in CHECKS_DISTRIBUTION)
        ]
        return self._with(vocabulary=vocabulary, steps=steps)

    def _with(self, **changed: Any) -> TokenDistribution:
        distribution = copy.copy(self)
        vars(distribution).update(changed)
        return distribution

    @property
    def key(self) -> Hashable | None:
        """What a captured function that uses it depends on; None if it reads a result back, or asks a caller."""
        parts: list[Hashable] = []
        for step in self.steps:
            if isinstance(step, Effect):
                parts.append(step.key)
            elif type(step) in PREFIX_FREE and type(step) not in CHECKS_DISTRIBUTION:  # which reads a result back
                parts.append((type(step), *sorted(vars(step).items())))
            else:
                parts.append(None)
        if None in parts:
            return None
        return tuple(parts)

    def hold(self, hold: Holder) -> None:
        """Keep the tensors of its effects where captured functions find them."""
        for index, effect in enumerate(self.effects):
            name = f"distribution {index} {type(effect.processor).__name__}"
            effect.hold(partial(_hold_field, hold, name))

    def settled(self, prefixes: Prefixes, logits: torch.Tensor) -> tuple[torch.Tensor, TokenDistribution]:
        """Forbid beforehand what only depends on how long the text is.

        Args:
            prefixes ([`Prefixes`]): B rows.
            logits (`torch.Tensor`): `[B, N, D]` of the N next positions, not written to.

        Returns:
            `tuple`: Logits that can still be corrected, and the distribution less the processors that are done with.
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
        """Process logits of positions, each with its own prefix.

        Args:
            prefixes ([`Prefixes`]): What all of a row see, B texts.
            logits (`torch.Tensor`): `[B, N, D]`.
            seen_by_each (`Callable`, *optional*): Gives what each of them sees, B * N texts, if that is more.

        Returns:
            `torch.Tensor`: Scores `[B, N, D]` in fp32.
        """
        if not self.needs_prefix:
            return self.process(logits.flatten(0, 1), prefixes).view_as(logits)
        # What looks at tokens names them by their ids.
        seen = seen_by_each() if seen_by_each else prefixes
        all_logits = self.vocabulary.scatter(logits)
        # Transformers' own processors know an answer for every prefix; a trie or a grammar may not.
        is_open: list[bool] | None = None
        if self.constraints:
            goes_on = self.stops.are_open(prefixes.lengths, seen)
            is_open = [on and not lacks for on, lacks in zip(goes_on, self.unanswered(prefixes, seen), strict=True)]
        return self.vocabulary.gather(self.process(all_logits.flatten(0, 1), seen, is_open=is_open)).view_as(logits)

    def unanswered(self, prefixes: Prefixes, seen: Prefixes) -> list[bool]:
        """Which texts behind some rows go on, but hold a token that a caller's own function forbids, or it cannot tell.

        Args:
            prefixes ([`Prefixes`]): B rows.
            seen ([`Prefixes`]): As many texts of each row, those of the first row first.
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
            scores (`torch.Tensor`): `[R, V]`, or `[R, M]` of candidates; not written to.
            prefixes ([`Prefixes`]): What each position sees.
            changeable (`Callable`, *optional*): Makes the copy that effects change; defaults to one of all tokens.
            is_open (`list[bool]`, *optional*): At which of them processors without an effect are asked; None for all.

        Returns:
            `torch.Tensor`: The same in fp32.
        """
        changed: Scores | None = None  # by the effects that follow each other
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
    """Class names of the processors that may remember their calls: all that are not known to be functions."""
    return [type(processor).__name__ for processor in processors if type(processor) not in STATELESS]


def choose(scores: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Take a token `[...]` from processed scores `[..., V]`: the likeliest, or the one that its noise draws.

    With noise it is a draw from their softmax, bit for bit that of `torch.multinomial(probs, 1)` with the noise that it
    would have drawn, and without its host synchronisation.

    Args:
        scores (`torch.Tensor`): `[..., V]` in fp32, or of candidates.
        noise (`torch.Tensor`, *optional*): Standard exponential, of the same shape.
    """
    if noise is None:
        return scores.argmax(dim=-1)
    return sample(scores, noise).indices


def sample(scores: torch.Tensor, noise: torch.Tensor) -> torch.return_types.max:
    """Values and tokens `[...]` that win a draw; a value is NaN where there is no distribution to draw from."""
    return (scores.softmax(dim=-1) / noise).max(dim=-1)
