"""Does a text loop: text that does flatters every way to speed it up."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 4


def distinct_ngram_ratio(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams of a text that are new; text that loops is near 0, and 1.0 is no repetition at all.

    Example:
    ```python
    >>> from hf_domino.data.ngrams import distinct_ngram_ratio
    >>> distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4])
    0.8

    ```
    """
    grams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
