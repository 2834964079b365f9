"""One generation's drafting by lookahead: the target guesses tokens far off beside those that it verifies.

A window stands behind each row's text: column q = 0..W-1 is a run of n - 1 tokens that may stand there from the q-th
position behind the anchor on. Its first token was guessed before its last. A column's path leads over the first tokens
of those before it, and in all of them the anchor is the first. What the target gives behind a path is the column's next
token: both together are an n-gram, which goes to the pool, and the column moves on by a position, its first token left
behind. The paths are branches of the round's tree, beside the n-grams of the pool that begin with the anchor. So a
guess that is right is accepted like any other.

Shapes: B rows, P proposals, N nodes, E paths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch

from hf_domino.decoding.drafting import TableSession
from hf_domino.decoding.noise.steps import DraftNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import Listener
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.tree.growing import Grown
from hf_domino.kinds.lookahead import begun_with, remember
from hf_domino.target.view import Captured


@dataclass
class Window:
    """Tokens that may follow a text.

    Args:
        height (`int`): Tokens of a column (n - 1).
    """

    height: int
    text: list[int] = field(default_factory=list)
    columns: dict[int, list[int]] = field(default_factory=dict)  # by the position of the first token

    def extend(self, tokens: Sequence[int], width: int) -> list[list[int]]:
        """Append tokens to the text, with so many columns (W) behind it; returns the n-grams that these end in turn."""
        first = max(len(self.text), self.height)
        self.text += tokens
        anchor, before = len(self.text) - 1, self.columns
        self.columns = {}
        # A column that there was not is the one before it and a token of the text, which may begin again.
        for place in range(anchor, anchor + width):
            shifted = [*self.columns[place - 1][1:], self._again(place + self.height - 1)] if self.columns else []
            self.columns[place] = before.get(place) or shifted or [self._again(anchor + i) for i in range(self.height)]
        self.columns[anchor] = [self.text[-1], *self.columns[anchor][1:]]
        return [self.text[end - self.height : end + 1] for end in range(first, len(self.text))]

    def _again(self, place: int) -> int:
        return self.text[place % len(self.text)]

    def paths(self) -> list[list[int]]:
        """The tokens from the anchor to each column's last."""
        columns = list(self.columns.values())
        return [[each[0] for each in columns[1 : index + 1]] + column[1:] for index, column in enumerate(columns)]

    def advance(self, tokens: Sequence[int | None]) -> list[list[int]]:
        """Move columns on by the token behind each, where that is known; returns the n-grams."""
        moved = [(place, column, token) for (place, column), token in zip(self.columns.items(), tokens, strict=True)]
        self.columns |= {place + 1: [*column[1:], token] for place, column, token in moved if token is not None}
        return [[*column, token] for _, column, token in moved if token is not None]


class LookaheadSession(TableSession):
    """Drafts n-grams of the pool, and a window of each row's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._windows: dict[int, Window] = {}  # by the call's row
        self._padded: tuple[list[int], int] = ([], 0)  # padding of each row, and how long prompts were with it
        self._begins: dict[int, int] = {}  # where each row's text begins
        self._drafted = False  # whether the round's proposals are of the windows
        self._noise: DraftNoise | None = None  # that the round's proposals were made for

    def observe(self, captured: Captured, length: int, mask: torch.Tensor | None = None) -> None:
        """See how far the prompts are padded."""
        self._padded = [0] * len(captured[0]) if mask is None else mask.int().argmax(dim=1).tolist(), length

    def _skip_padding(self, prefixes: Prefixes) -> None:
        """Find where texts begin, in the first round: ids may be of a prompt's last positions only, or of none."""
        if not self._begins:
            padding, length = self._padded
            places = zip(prefixes.rows, prefixes.lengths, strict=True)
            self._begins = {row: max(0, padding[row] - (length - (present - 1))) for row, present in places}

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:
        """Move windows on by what the target gives behind their paths: in trees, with the noise of its step."""
        self._skip_padding(prefixes)
        if not self._drafted:
            return
        self._drafted = False
        with self.timer.phase("draft"):
            windows = [self._windows[row] for row in prefixes.rows]
            ends = [_ends(proposals.branches(index), window.paths()) for index, window in enumerate(windows)]
            found = [(row, *end) for row, each in enumerate(ends) for end in each if end is not None]
            tokens = iter(self._chosen(found, logits))
            known = [[None if end is None else next(tokens) for end in each] for each in ends]
            moved = (window.advance(each) for window, each in zip(windows, known, strict=True))
            remember(self.drafter, list(chain.from_iterable(moved)))
            self._noise = None

    def _chosen(self, found: list[tuple[int, int, int]], logits: torch.Tensor) -> list[int]:
        """The target's tokens at positions, each given by its row, place and depth."""
        if not found:
            return []
        rows, places, depths = torch.tensor(found).T.to(logits.device)
        scores = logits[rows, places].float()  # [E, V]
        if isinstance(self._noise, torch.Tensor):
            scores = scores / self.law.temperature - self._noise[rows, depths].log()
        return scores.argmax(dim=1).tolist()

    def _paths(self, prefixes: Prefixes, most: int, num_nodes: int | None = None) -> list[list[list[int]]]:
        """Of each row the paths to propose, what is likeliest first.

        Args:
            prefixes ([`Prefixes`]): Tokens so far.
            most (`int`): Most tokens of a path.
            num_nodes (`int`, *optional*): Of the tree, half of which a window may take: its other half is the pool's.
        """
        self._skip_padding(prefixes)
        self._drafted = True
        config, last = self.drafter.config, self.drafter.config.vocab_size - 1
        height = config.ngram_size - 1
        width = min(config.window_size, most - height + 2)
        if num_nodes is not None:
            width = min(width, (num_nodes // 2 + 1) // height)
        windows, ended = [], []
        for index, (row, length) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            window = self._windows.setdefault(row, Window(height))
            new = prefixes.ids[index, self._begins[row] + len(window.text) : length]
            # Some ids have no embedding.
            ended += window.extend(new.clamp(0, last).tolist(), max(width, 1))
            windows.append(window)
        remember(self.drafter, ended)
        kept = begun_with(self.drafter, [window.text[-1] for window in windows])
        rows = zip(kept, windows, strict=True)
        return [[path for path in chain(*zip_longest(pool, window.paths())) if path] for pool, window in rows]

    def _choose(
        self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: DraftNoise | None, listener: Listener | None
    ) -> torch.Tensor:
        """The likeliest path, `[B, P]`."""
        paths = [paths[0] for paths in self._paths(prefixes, draft_hidden.shape[1])]
        count = min(max(len(path) for path in paths), draft_hidden.shape[1])
        paths = [(path + path[-1:] * count)[:count] for path in paths]
        tokens = torch.tensor(paths, device=draft_hidden.device)
        if listener is not None:
            for token in tokens.split(1, dim=1):  # each is certain
                listener(torch.zeros_like(token, dtype=torch.float32), token)
        return tokens

    def _lanes(self, *args: Any, **kwargs: Any) -> None:
        """None: what there is to propose is known at once."""

    def _grow(
        self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: torch.Tensor | None, **options: Any
    ) -> Grown:
        """All paths, as far as the tree may grow. No chance is known of any."""
        self._noise = noise
        ends, most = self.law.stops.eos_token_ids, draft_hidden.shape[1]
        found = self._paths(prefixes, most, options["num_nodes"])
        nodes = [_joined(paths, options["num_nodes"], most, ends) for paths in found]
        count = max(len(each) for each in nodes)
        nodes = [each + each[-1:] * (count - len(each)) for each in nodes]  # the last one may be there twice
        parents, tokens = torch.tensor(nodes, device=draft_hidden.device).unbind(dim=2)
        tree = Tree(tokens, parents, most)
        return Grown(tree, torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device))


def _joined(paths: Iterable[Sequence[int]], num_nodes: int, most: int, ends: frozenset[int]) -> list[tuple[int, int]]:
    """The nodes of a tree of paths, as the position of each one's parent and its token."""
    places: dict[tuple[int, int], int] = {}
    for path in paths:
        place = 0
        for token in path[:most]:
            if (place, token) not in places and len(places) == num_nodes:
                break
            place = places.setdefault((place, token), len(places) + 1)
            if token in ends:
                break
    return list(places)


def _ends(branches: dict[tuple[int, int], int], paths: Iterable[Sequence[int]]) -> list[tuple[int, int] | None]:
    """The position and the depth of each path's last node; None where it is not there."""
    found: list[tuple[int, int] | None] = []
    for path in paths:
        place: int | None = 0
        for token in path:
            place = None if place is None else branches.get((place, token))
        found.append(None if place is None else (place, len(path)))
    return found
