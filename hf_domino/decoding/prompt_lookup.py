"""Prompt lookup beside a drafter: a round may copy its proposals from the text so far, in place of drafting them.

Where the last tokens have stood before, what followed them there often follows again: names, numbers, whole lines that
an answer takes from its prompt. Copying costs no drafter, and a long match promises more than a drafter can. So a round
copies where its matches promise more tokens than drafts have brought of late. Proposals change no text; which rounds
copy is decided by tokens alone, never by the clock.

Transformers' own prompt lookup, without a drafter, takes the first match of at most two tokens.

Shapes: B rows still generated, P proposals.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from hf_domino.decoding.pacing.estimates import NOMINAL_PROPOSAL, Acceptance, Tokens
from hf_domino.decoding.pacing.pacer import Block, PacedBlock
from hf_domino.decoding.prefixes import Prefixes

# A copied token's class is the length of the match before it, from each of these on. The first guess of its acceptance
# is what 132 held-out answers of SmolLM2-135M-Instruct showed; one of no match is a stopgap.
GUESSES = {0: 0.0, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 7: 0.8, 9: 0.85, 13: 0.9, 32: 0.95}
LENGTHS = tuple(GUESSES)
LONGEST_MATCH = LENGTHS[-1]  # longer ones are not told apart
MOST_PLACES = 64  # the latest ones where the last two tokens stood, whose matches are compared
LEAST_TOKENS = 1.5  # that a copied round must promise: it takes about as many single steps
DRAFT_TOKENS = 2.0  # of a drafted round, before there was one


class PromptLookup:
    """Proposals copied from the text of each row, for the rounds of one call.

    Args:
        most (`int`): Most tokens to copy in a round; 0 for none at all.
    """

    def __init__(self, most: int):
        self.most = most
        self._acceptance, self._drafted = Acceptance(GUESSES.values()), Tokens()
        self._drafted.observe(DRAFT_TOKENS)
        self._texts: defaultdict[int, Text] = defaultdict(Text)

    @classmethod
    def of_call(cls, config: GenerationConfig, num_draft_tokens: int) -> PromptLookup:
        """What a call's `prompt_lookup_num_tokens` asks for.

        Args:
            config (`GenerationConfig`): The merged configuration of the call.
            num_draft_tokens (`int`): Most proposals of the drafter; in rounds of fixed shape no more can be copied.
        """
        most = config.prompt_lookup_num_tokens or 0
        return cls(min(most, num_draft_tokens) if config.cache_implementation == "static" else most)

    def begin_round(self, prefixes: Prefixes, room: int) -> CopiedBlock | None:
        """What to copy for these rows, `room` tokens at most; None where drafting promises more."""
        if not (most := min(self.most, room)):
            return None
        matches = [self._text(prefixes, index).longest_match() for index in range(len(prefixes.rows))]
        block = CopiedBlock(self._acceptance, [length for length, _ in matches])
        while block.length < most and block.goes_on_copying():
            pass
        if block.expected <= max(self._drafted.expected, LEAST_TOKENS):
            return None
        texts = [self._texts[row] for row in prefixes.rows]
        copies = [text.behind(end, block.length) for text, (_, end) in zip(texts, matches, strict=True)]
        block.proposals = torch.tensor(copies).to(prefixes.ids.device, non_blocking=True)
        return block

    def observe(self, block: Block, num_committed: Sequence[int]) -> None:
        """Learn from a round: its block, the tokens it committed per row."""
        if isinstance(block, CopiedBlock):
            for kinds, count in zip(block.kinds(), num_committed, strict=True):
                self._acceptance.observe(kinds, count - 1)
        elif not block.is_comparison:
            self._drafted.observe(sum(num_committed) / len(num_committed))

    def _text(self, prefixes: Prefixes, index: int) -> Text:
        """The text of a row, as long as its prefix is."""
        text, length = self._texts[prefixes.rows[index]], prefixes.lengths[index]
        text.extend(prefixes.ids[index, len(text) : length].tolist())
        return text


class CopiedBlock(PacedBlock):
    """A block that is copied, as far as its matches make it worth its time.

    Args:
        acceptance ([`Acceptance`]): What is known of copied tokens.
        matches (`list[int]`): Length of each row's match.
    """

    proposals: torch.Tensor  # [B, P]

    def __init__(self, acceptance: Acceptance, matches: list[int]):
        super().__init__(acceptance, NOMINAL_PROPOSAL * LEAST_TOKENS, len(matches))
        self._matches = matches

    def choose_length(self, room: int) -> int:
        """As many proposals as were copied."""
        return self.length

    def goes_on_copying(self) -> bool:
        """Count one token more, whose match is longer by those before it; returns whether another one is worth it."""
        matches = [length + self.length if length else 0 for length in self._matches]
        return self.add(self.length, [bisect.bisect(LENGTHS, length) - 1 for length in matches])


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
        if len(self) < 2:
            return 0, 0
        places, best = self._places.get((self._tokens[-2], self._tokens[-1]), []), (0, 0)
        for end in reversed(places[-MOST_PLACES:]):
            if (length := self._match_at(end)) > best[0]:
                best = (length, end)
        return best

    def _match_at(self, end: int) -> int:
        """How many tokens before a place are the last ones of the text."""
        length, most = 2, min(end, LONGEST_MATCH)
        while length < most and self._tokens[end - length - 1] == self._tokens[-length - 1]:
            length += 1
        return length

    def behind(self, place: int, count: int) -> list[int]:
        """`count` tokens from a place on; behind the text's end, those go on that were copied."""
        copied = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied
