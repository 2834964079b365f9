"""Keep texts that loop, or that contain prompts of an evaluation, out of the training data.

Two texts do not share 13 words in a row by chance (GPT-3, arXiv 2005.14165, appendix C).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

NGRAM = 4  # tokens; repeated n-grams show a loop
TAIL = 64  # tokens; a text that has begun to loop still does so at its end
RUN = 13  # words in a row that no two texts share by chance


def words_of(text: str) -> tuple[str, ...]:
    """Split a text into words, ignoring case and punctuation."""
    return tuple(re.findall(r"\w+", text.casefold()))


def distinct_ngram_ratio(tokens: Sequence[int]) -> float:
    """Compute the share of distinct 4-grams in a text: near 0 if it loops, 1.0 if nothing is repeated.

    Example:
    ```python
    >>> from hf_domino.data.filters import distinct_ngram_ratio
    >>> distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4])
    0.8

    ```
    """
    grams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    if not grams:
        return 1.0
    return len(set(grams)) / len(grams)


def loops(ids: Sequence[int], min_distinct: float) -> bool:
    """Return whether too few 4-grams of a text, or of its last 64 tokens, are distinct.

    Example:
    ```python
    >>> from hf_domino.data.filters import loops
    >>> loops(list(range(100)) + [1, 2] * 40, min_distinct=0.5), loops(list(range(100)), min_distinct=0.5)
    (True, False)

    ```
    """
    return min(distinct_ngram_ratio(ids), distinct_ngram_ratio(ids[-TAIL:])) < min_distinct


class Exclusions:
    """Texts that the training text must not contain, such as the prompts of an evaluation."""

    def __init__(self, texts: Iterable[str]):
        self._runs = {run for text in texts for run in _runs_of(text)}

    def overlap(self, text: str) -> bool:
        """Return whether a text shares 13 words in a row with an excluded one, or is equal to a shorter one."""
        return not self._runs.isdisjoint(_runs_of(text))


def _runs_of(text: str) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {words[start : start + RUN] for start in range(max(len(words) - RUN, 0) + 1)}
