"""Prompt lookup in addition to a drafter: a round can propose tokens from the text so far instead of drafting.

If the last tokens have occurred earlier in the text, the tokens that followed them there often follow again. Examples
are names, numbers and whole lines that an answer takes from its prompt. Looking them up takes almost no time, and a
long match predicts more tokens than a drafter can. The output does not change.

Transformers' own prompt lookup, which works without a drafter, takes the first match of at most two tokens.

Shapes: B unfinished sequences, P proposals.
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

# Proposed tokens are grouped into classes by the length of the match before them. Each key is the smallest length of a
# class, and each value is the first guess of its acceptance rate, measured on 132 held-out answers of
# SmolLM2-135M-Instruct. A sequence of a batch without a match proposes its own beginning, which has class 0.
GUESSES = {0: 0.0, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 7: 0.8, 9: 0.85, 13: 0.9, 32: 0.95}
LENGTHS = tuple(GUESSES)
LONGEST_MATCH = LENGTHS[-1]  # longer matches count as this long
MOST_PLACES = 64  # how many of the latest occurrences of the last two tokens are compared


class Text:
    """The tokens of one sequence, with an index of where each pair of tokens occurred.

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
        # The index of the token after each occurrence of a pair.
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            if len(self._tokens) >= 2:
                self._places[self._tokens[-2], self._tokens[-1]].append(len(self._tokens))
            self._tokens.append(token)

    def longest_match(self) -> tuple[int, int]:
        """Find the longest earlier occurrence of the last tokens, and the latest one of equally long ones.

        Returns:
            `tuple`: Its length, which is at least 2, or 0 without a match; and the index of the token after it.
        """
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
        """How many tokens before this index equal the last tokens of the text."""
        length = 2
        most = min(place, LONGEST_MATCH)
        while length < most and self._tokens[place - length - 1] == self._tokens[-length - 1]:
            length += 1
        return length

    def behind(self, place: int, count: int) -> list[int]:
        """The next `count` tokens from this index on, repeated from there if the text ends before."""
        found = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(found) < count:
            found.append(found[len(found) - period])
        return found


class PromptLookup:
    """Proposes tokens from the text of each sequence, in the rounds of one call.

    Args:
        most (`int`): Maximum number of tokens to propose in a round; 0 to turn prompt lookup off.
        vocab_size (`int`): The number of ids that have logits. Ids from here on have none, and neither have negative
            ids, such as the placeholder of an image.
        is_static (`bool`, *optional*, defaults to `False`): Whether to propose only a few different lengths, because
            each length is a shape of its own. `most` must be one of them.
    """

    # Returns the tokens of a sequence (by its index) from an index on. The code that runs the rounds sets it.
    read: Callable[[int, int], Sequence[int]]

    def __init__(self, most: int, vocab_size: int, is_static: bool = False):
        self.most = most
        self._last_id = vocab_size - 1
        self._is_static = is_static
        self._acceptance = Acceptance(len(GUESSES), lambda lift: list(GUESSES.values()))
        self._texts: defaultdict[int, Text] = defaultdict(Text)

    @classmethod
    def of_call(cls, config: GenerationConfig, drafter_config: DominoConfig, vocab_size: int) -> PromptLookup:
        """Create the prompt lookup that the `prompt_lookup_num_tokens` of a call asks for.

        Args:
            config (`GenerationConfig`): The merged configuration of the call.
            drafter_config ([`DominoConfig`]): The drafter's configuration. In rounds of fixed shape, its
                `num_draft_tokens` limits the number of proposals.
            vocab_size (`int`): The target's number of tokens.
        """
        most = config.prompt_lookup_num_tokens or 0
        is_static = config.cache_implementation == "static"
        if is_static:
            longest = drafter_config.num_draft_tokens
            lengths = {fitting_length(length, longest) for length in range(longest + 1)}
            most = max(length for length in lengths if length <= most)
        return cls(most, vocab_size, is_static)

    def offer(self, prefixes: Prefixes, room: int, price: float) -> Offer | None:
        """Offer as many proposals as are worth their time; None if there are none.

        Args:
            prefixes ([`Prefixes`]): The tokens so far of the B sequences.
            room (`int`): How many tokens there is room for.
            price (`float`): How many tokens one more proposal must be expected to add, per sequence.
        """
        if not (most := min(self.most, room)):
            return None
        texts = [self._text(row) for row in prefixes.rows]
        matches = [text.longest_match() for text in texts]
        # If all proposals before a token are accepted, its match is longer by as many tokens.
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
        # An id without logits is never the target's token. It is replaced by the first or the last id, which is also
        # unlikely to be accepted.
        return torch.tensor(offer.tokens).clamp(0, self._last_id).to(prefixes.ids.device, non_blocking=True)

    def observe(self, outcome: Outcome) -> None:
        """Learn how many of its proposals were accepted from a round that used prompt lookup."""
        if (offer := outcome.plan.offer) is not None:
            self._acceptance.forget()
            for classes, count in zip(offer.classes, outcome.num_emitted, strict=True):
                self._acceptance.observe(classes, count - 1)

    def _text(self, row: int) -> Text:
        """The text of a sequence so far."""
        text = self._texts[row]
        text.extend(self.read(row, len(text)))
        return text
