"""Prompt lookup beside a drafter: a round may propose tokens of the text so far instead of drafting.

If the last tokens have occurred before, what followed them there often follows again: names, numbers, whole lines that
an answer takes from its prompt. Looking them up takes no time, and a long match promises more than a drafter can. The
output does not change.

Transformers' own prompt lookup, without a drafter, takes the first match of at most two tokens.

Shapes: B rows still generated, P proposals.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import torch
from transformers import GenerationConfig

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.decoding.estimates import Acceptance
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.round import Offer, Outcome, fitting_length

# The class of a proposed token is the length of the match before it, from each of these on. The first guess of its
# acceptance was measured on 132 held-out answers of SmolLM2-135M-Instruct. A sequence of a batch without a match
# proposes its own beginning, which promises nothing.
GUESSES = {0: 0.0, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 7: 0.8, 9: 0.85, 13: 0.9, 32: 0.95}
LENGTHS = tuple(GUESSES)
LONGEST_MATCH = LENGTHS[-1]  # longer ones are not told apart
MOST_PLACES = 64  # the latest ones where the last two tokens stood, whose matches are compared


class Text:
    """The tokens of one row, and where each two of them stood.

    Example:
    ```python
    >>> from hf_domino.decoding.prompt_lookup import Text
    >>> text = Text()
    >>> text.extend([7, 8, 9, 5, 8, 9, 6, 7, 8, 9])
    >>> text.longest_match()  # 7 8 9, which ended before token 3
    (3, 3)
    >>> text.behind(3, 4)
    [5, 8, 9, 6]

    ```
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # of what stands behind the two

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            if len(self._tokens) >= 2:
                self._places[self._tokens[-2], self._tokens[-1]].append(len(self._tokens))
            self._tokens.append(token)

    def longest_match(self) -> tuple[int, int]:
        """How many of the last tokens have stood before, at least two or 0, and the place behind them; the latest."""
        best = (0, 0)
        if len(self) < 2:
            return best
        for place in reversed(self._places.get((self._tokens[-2], self._tokens[-1]), [])[-MOST_PLACES:]):
            if (length := self._match_at(place)) > best[0]:
                best = (length, place)
            if length == LONGEST_MATCH:
                break
        return best

    def _match_at(self, place: int) -> int:
        """How many tokens before a place are the last ones."""
        length = 2
        most = min(place, LONGEST_MATCH)
        while length < most and self._tokens[place - length - 1] == self._tokens[-length - 1]:
            length += 1
        return length

    def behind(self, place: int, count: int) -> list[int]:
        """`count` tokens from a place on; behind the end of the text, the tokens found so far are repeated."""
        found = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class PromptLookup:
    """Proposals from the text of each sequence, for the rounds of one call.

    Args:
        most (`int`): Most tokens to propose in a round; 0 for no prompt lookup.
        vocab_size (`int`): Ids from here on have no logits, nor have those below 0, such as a placeholder of an image.
        is_static (`bool`, *optional*, defaults to `False`): Whether to propose one of a few lengths, because each
            is a shape of its own; `most` is one of them.
    """

    # Gives the tokens of a row from a place on; who drives the rounds sets it.
    read: Callable[[int, int], Sequence[int]]

    def __init__(self, most: int, vocab_size: int, is_static: bool = False):
        self.most = most
        self._last_id = vocab_size - 1
        self._is_static = is_static
        self._acceptance = Acceptance(len(GUESSES), lambda lift: list(GUESSES.values()))
        self._texts: defaultdict[int, Text] = defaultdict(Text)

    @classmethod
    def of_call(cls, config: GenerationConfig, drafter_config: DominoConfig) -> PromptLookup:
        """The lookup that a call's `prompt_lookup_num_tokens` asks for.

        Args:
            config (`GenerationConfig`): The merged configuration of the call.
            drafter_config ([`DominoConfig`]): Rounds of fixed shape propose no more tokens than a draft has.
        """
        most = config.prompt_lookup_num_tokens or 0
        is_static = config.cache_implementation == "static"
        if is_static:
            longest = drafter_config.num_draft_tokens
            lengths = {fitting_length(length, longest) for length in range(longest + 1)}
            most = max(length for length in lengths if length <= most)
        return cls(most, drafter_config.vocab_size, is_static)

    def offer(self, prefixes: Prefixes, room: int, price: float) -> Offer | None:
        """What these sequences can propose, as far as it is worth its time; None for nothing.

        Args:
            prefixes ([`Prefixes`]): The B rows.
            room (`int`): Most tokens.
            price (`float`): Tokens that one more proposal must be expected to add, per sequence.
        """
        if not (most := min(self.most, room)):
            return None
        texts = [self._text(row) for row in prefixes.rows]
        matches = [text.longest_match() for text in texts]
        # Where all before a token are accepted, its match is longer by those.
        classes = [
            [bisect.bisect(LENGTHS, match + position) - 1 if match else 0 for position in range(most)]
            for match, _ in matches
        ]
        rates = self._acceptance.rates()
        reaches = [list(accumulate((rates[kind] for kind in row), mul)) for row in classes]
        promises = [sum(column) / len(column) for column in zip(*reaches, strict=True)]
        length = next((place for place, promise in enumerate(promises) if promise < price), most)
        if self._is_static:
            length = fitting_length(length, most)
        if not length:
            return None
        found = [text.behind(end, length) for text, (_, end) in zip(texts, matches, strict=True)]
        return Offer(found, [row[:length] for row in classes], 1.0 + sum(promises[:length]))

    def proposals(self, offer: Offer, prefixes: Prefixes) -> torch.Tensor:
        """The proposed tokens `[B, P]`."""
        # What has no logits is never the target's token, nor is the first or last one it is replaced by likely to be.
        return torch.tensor(offer.tokens).clamp(0, self._last_id).to(prefixes.ids.device, non_blocking=True)

    def observe(self, outcome: Outcome) -> None:
        """Learn from a round."""
        if (offer := outcome.plan.offer) is not None:
            self._acceptance.forget()
            for classes, count in zip(offer.classes, outcome.num_emitted, strict=True):
                self._acceptance.observe(classes, count - 1)

    def _text(self, row: int) -> Text:
        """The text of a row so far."""
        text = self._texts[row]
        text.extend(self.read(row, len(text)))
        return text
