"""Where the last tokens of a text stood before: what followed them there may follow again."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence

# A copied token's class is the length of the match before it, from each of these on. The first guess of its acceptance
# is what 132 held-out answers of SmolLM2-135M-Instruct showed. A row without a match copies its beginning, which
# promises nothing.
GUESSES = {0: 0.0, 2: 0.4, 3: 0.5, 4: 0.6, 5: 0.7, 7: 0.8, 9: 0.85, 13: 0.9, 32: 0.95}
LENGTHS = tuple(GUESSES)
LONGEST_MATCH = LENGTHS[-1]  # longer ones are not told apart
MOST_PLACES = 64  # the latest ones where the last two tokens stood, whose matches are compared


def kind_of(length: int) -> int:
    """Class of what is copied behind a match of this length."""
    return bisect.bisect(LENGTHS, length) - 1


class Text:
    """The tokens of one row, and where each two of them stood.

    Example:
    ```python
    >>> from hf_domino.decoding.matches import Text
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

    def token(self, place: int, path: Sequence[int] = ()) -> int:
        """The token at a place of the text and of some tokens behind it."""
        return self._tokens[place] if place < len(self._tokens) else path[place - len(self._tokens)]

    def longest_match(self, path: Sequence[int] = ()) -> tuple[int, int]:
        """How many of the last tokens have stood before, at least two or 0, and the place behind them; the latest.

        Args:
            path (`Sequence[int]`, *optional*): Tokens behind the text that are looked for with it.
        """
        end = len(self) + len(path)
        if end < 2:
            return 0, 0
        pair, best = (self.token(end - 2, path), self.token(end - 1, path)), (0, 0)
        for place in reversed(self._places.get(pair, [])[-MOST_PLACES:]):
            if (length := self._match_at(place, path)) > best[0]:
                best = (length, place)
            if length == LONGEST_MATCH:
                break
        return best

    def _match_at(self, place: int, path: Sequence[int]) -> int:
        """How many tokens before a place are the last ones."""
        length, most, end = 2, min(place, LONGEST_MATCH), len(self) + len(path)
        while length < most and self._tokens[place - length - 1] == self.token(end - length - 1, path):
            length += 1
        return length

    def behind(self, place: int, count: int) -> list[int]:
        """`count` tokens from a place on; behind the text's end, those go on that were copied."""
        copied = self._tokens[place : place + count]
        period = len(self._tokens) - place
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied
