"""What is left out of training text: copies, near copies, loops, and what a drafter will be measured on.

Near copies are found by MinHash (Broder 1997): the share of hash functions under which two texts have the same smallest
shingle is an estimate of how many shingles they share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

NEAR = 0.8  # share of common shingles from which two texts are near copies
SHINGLE = 8  # bytes of normalised text
NUM_HASHES, BAND = 128, 4  # 32 bands of 4: texts that share 0.8 miss each other once in ten million
NGRAM = 4  # tokens by which loops are found
TAIL = 64  # tokens; a text that falls into a loop does so at its end
OVERLAP_WORDS = 13  # words in a row that no two texts share by chance (arXiv 2005.14165, appendix C)
SHORT_WORDS = 5  # a text of fewer is found only where it is the whole text
_ODD = np.random.default_rng(0).integers(2**63, size=(NUM_HASHES, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def words_of(text: str) -> list[str]:
    """The words of a text, without case and punctuation."""
    return re.findall(r"\w+", text.casefold())


def distinct_ngram_ratio(tokens: Sequence[int]) -> float:
    """Share of the 4-grams of a text that are new; text that loops is near 0, and 1.0 is no repetition at all.

    Example:
    ```python
    >>> from hf_domino.data.filters import distinct_ngram_ratio
    >>> distinct_ngram_ratio([1, 2, 3, 4, 1, 2, 3, 4])
    0.8

    ```
    """
    grams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loops(ids: Sequence[int], min_distinct: float) -> bool:
    """Whether less than a share of a text's 4-grams, or of those of its last 64 tokens, are distinct.

    Example:
    ```python
    >>> from hf_domino.data.filters import loops
    >>> loops(list(range(100)) + [1, 2] * 40, min_distinct=0.5), loops(list(range(100)), min_distinct=0.5)
    (True, False)

    ```
    """
    return min(distinct_ngram_ratio(ids), distinct_ngram_ratio(ids[-TAIL:])) < min_distinct


class NearCopies:
    """Texts seen, and whether another one is a copy or a near copy of one of them."""

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._bands: dict[tuple[int, bytes], list[int]] = {}
        self._signatures: list[np.ndarray] = []

    def find(self, text: str) -> str | None:
        """`"copy"`, `"near copy"` or None; case, punctuation and white space do not count."""
        return self._find(" ".join(words_of(text)))[0]

    def add(self, text: str) -> str | None:
        """As [`find`]; a text that is neither is kept in mind."""
        normalised = " ".join(words_of(text))
        found, signature = self._find(normalised)
        if signature is not None and found is None:
            self._exact.add(normalised)
            for band in _bands_of(signature):
                self._bands.setdefault(band, []).append(len(self._signatures))
            self._signatures.append(signature)
        return found

    def _find(self, normalised: str) -> tuple[str | None, np.ndarray | None]:
        if normalised in self._exact:
            return "copy", None
        signature = _signature(normalised)
        near = {index for band in _bands_of(signature) for index in self._bands.get(band, ())}
        is_near = any((self._signatures[index] == signature).mean() >= NEAR for index in near)
        return ("near copy" if is_near else None), signature


def _signature(text: str) -> np.ndarray:
    """Smallest hash of the text's shingles under each hash function, `[NUM_HASHES]` uint32."""
    data = np.frombuffer(text.encode("utf-8").ljust(SHINGLE), dtype=np.uint8)
    shingles = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(data, SHINGLE)).view(np.uint64).ravel()
    mixed = shingles ^ (shingles >> np.uint64(29))  # so that the high bits depend on all bytes
    hashes = (mixed * _ODD) >> np.uint64(32)  # [NUM_HASHES, shingles], modulo 2**64
    return hashes.min(axis=1).astype(np.uint32)


def _bands_of(signature: np.ndarray) -> Iterable[tuple[int, bytes]]:
    return ((start, signature[start : start + BAND].tobytes()) for start in range(0, NUM_HASHES, BAND))


class Exclusions:
    """Texts that training text must not hold, such as the prompts of an evaluation."""

    def __init__(self, texts: Iterable[str]):
        self._copies = NearCopies()
        self._runs: dict[int, set[str]] = {}
        for text in texts:
            self._copies.add(text)
            words = words_of(text)
            length = min(len(words), OVERLAP_WORDS)
            if length >= SHORT_WORDS:
                self._runs.setdefault(length, set()).update(_runs_of(words, length))

    def overlap(self, text: str) -> bool:
        """Whether a text is a near copy of an excluded one, or shares 13 words in a row (a shorter one whole)."""
        words = words_of(text)
        shares = any(not runs.isdisjoint(_runs_of(words, length)) for length, runs in self._runs.items())
        return shares or self._copies.find(text) is not None


def _runs_of(words: Sequence[str], length: int) -> Iterable[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))
