"""The tokens so far of every row, and those that each position of a block sees.

Shapes: B rows, T tokens so far, N positions, M tokens behind the prefix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Prefixes:
    """The tokens so far of the rows that are still generated; rows differ in length.

    Args:
        ids (`torch.Tensor` or `Callable`): Ids `[B, T]`, each row from its first token on, or what gives them if they
            may not be asked for. What stands behind a row's length is anything.
        lengths (`list[int]`): Tokens of each row.
        rows (`list[int]`): Which row of the batch that `generate` was given each one is.
    """

    def __init__(self, ids: torch.Tensor | Callable[[], torch.Tensor], lengths: list[int], rows: list[int]):
        self._ids, self.lengths, self.rows = ids, lengths, rows

    @property
    def ids(self) -> torch.Tensor:
        """Ids `[B, T]`."""
        if not isinstance(self._ids, torch.Tensor):
            self._ids = self._ids()
        return self._ids

    @classmethod
    def of(cls, ids: torch.Tensor) -> Prefixes:
        """All rows of a batch `[B, T]`, equally long."""
        return cls(ids, [ids.shape[1]] * len(ids), list(range(len(ids))))

    @property
    def is_even(self) -> bool:
        """Whether all rows are equally long."""
        return min(self.lengths) == max(self.lengths)

    def last(self) -> torch.Tensor:
        """The last token of each row, `[B, 1]`."""
        return self.endings(1)

    def endings(self, count: int) -> torch.Tensor:
        """The last `count` tokens of each row, `[B, count]`; of a shorter row anything."""
        if self.is_even and count <= (length := self.lengths[0]):
            return self.ids[:, length - count : length]
        if not self.ids.shape[1]:  # a prompt of embeddings alone
            return self.ids.new_zeros(len(self.ids), count)
        columns = self.per_row(self.lengths) - count + torch.arange(count, device=self.ids.device)
        return self.ids.gather(1, columns.clamp_min(0))

    def per_row(self, values: list) -> torch.Tensor:
        """One value of the host for each row, `[B, 1]` beside the ids, without waiting for their device."""
        return torch.tensor(values)[:, None].to(self.ids.device, non_blocking=True)

    def between(self, starts: list[int]) -> torch.Tensor:
        """Which ids belong to each row's text, from a place on: `[B, T]` bool."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        where = columns < self.per_row(self.lengths)
        return where & (columns >= self.per_row(starts)) if any(starts) else where

    def hold(self, tokens: torch.Tensor, starts: list[int], vocab_size: int) -> torch.Tensor:
        """Which of some tokens `[B, N]` below `vocab_size` stand in each row's text, from a place on: `[B, N]` bool."""
        is_token = self.between(starts) & (self.ids >= 0) & (self.ids < vocab_size)
        ids = torch.where(is_token, self.ids, vocab_size)
        held = torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device)
        return held.scatter_(1, ids, True).gather(1, tokens)

    def foreseen(self, num_positions: int) -> Prefixes:
        """What successive positions see, with the last known token in place of the block's own, yet to be chosen."""
        return self.along(self.last().expand(-1, num_positions - 1), num_positions)

    def lanes(self, count: int) -> Prefixes:
        """So many texts that begin with each row, those of the first row first."""
        if count == 1:
            return self
        lengths = [length for length in self.lengths for _ in range(count)]
        rows = [row for row in self.rows for _ in range(count)]
        return Prefixes(lambda: self.ids.repeat_interleave(count, dim=0), lengths, rows)

    def along(self, continuation: torch.Tensor, num_positions: int) -> Prefixes:
        """What successive positions see: the last one all of a continuation, each one before it a token less.

        Args:
            continuation (`torch.Tensor`): Tokens behind the prefixes, `[B, M]`.
            num_positions (`int`): Positions of each row (N), at most M + 1.

        Returns:
            [`Prefixes`]: B * N of them, the positions of the first row first.
        """
        count = continuation.shape[1]
        first = count - num_positions + 1
        lengths = [length + first + index for length in self.lengths for index in range(num_positions)]
        rows = [row for row in self.rows for _ in range(num_positions)]
        return Prefixes(lambda: self._joined(continuation).repeat_interleave(num_positions, dim=0), lengths, rows)

    def _joined(self, continuation: torch.Tensor) -> torch.Tensor:
        """Ids `[B, T + M]` with tokens `[B, M]` behind each row's length."""
        ids = torch.cat((self.ids[:, : max(self.lengths)], continuation), dim=1)
        if self.is_even:
            return ids
        columns = self.per_row(self.lengths) + torch.arange(continuation.shape[1], device=ids.device)
        return ids.scatter(1, columns, continuation)
