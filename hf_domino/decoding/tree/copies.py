"""Copies from the text: how a branch goes on where its last tokens stood before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_domino.decoding.matches import Text
from hf_domino.decoding.tree.chances import Copied

NOTHING = (0, 0)


@dataclass(frozen=True)
class _Lane:
    """A text and some tokens behind it, and where those last tokens stood before.

    Args:
        path (`tuple[int, ...]`): The tokens behind the text.
        length (`int`): How many of its last tokens have stood before; 0 for none.
        place (`int`): Behind them.
    """

    path: tuple[int, ...]
    length: int
    place: int


class CopyLanes:
    """How the lanes of a round's trees go on in their own texts.

    Args:
        texts (`Sequence[Text]`): Of the B rows.
        num_depths (`int`): Most tokens of a path.
        vocab_size (`int`): Other ids, such as a placeholder of an image, are not copied.
    """

    def __init__(self, texts: Sequence[Text], num_depths: int, vocab_size: int):
        self.num_depths, self._texts, self._vocab_size = num_depths, texts, vocab_size
        self._lanes = [[_Lane((), *text.longest_match())] for text in texts]

    def found(self, depth: int) -> Copied | None:
        """Of each row's lanes at this depth, how the text goes on; None where it does so for none of them."""
        if depth >= self.num_depths or not any(lane.length for lanes in self._lanes for lane in lanes):
            return None
        rows = zip(self._texts, self._lanes, strict=True)
        return [[self._copied(text, lane) for lane in lanes] for text, lanes in rows]

    def advance(self, lanes: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Go on with lanes behind these, each by a token, given as pairs per row."""
        self._lanes = [
            [self._behind(text, before[lane], token) for lane, token in row]
            for text, before, row in zip(self._texts, self._lanes, lanes, strict=True)
        ]

    def _copied(self, text: Text, lane: _Lane) -> tuple[int, int]:
        token = text.token(lane.place, lane.path) if lane.length else -1
        return (token, lane.length) if 0 <= token < self._vocab_size else NOTHING

    def _behind(self, text: Text, lane: _Lane, token: int) -> _Lane:
        path = (*lane.path, token)
        if lane.length and text.token(lane.place, lane.path) == token:
            return _Lane(path, lane.length + 1, lane.place + 1)
        return _Lane(path, *text.longest_match(path))
