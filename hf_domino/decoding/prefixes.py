"""The tokens so far of every row, and those that each position of a block sees.

Shapes: B rows, T tokens so far, N positions, M tokens behind the prefix.
"""

from __future__ import annotations

from functools import cached_property

import torch


class Prefixes:
    """The tokens so far of the rows that are still generated; rows differ in length.

    Args:
        ids (`torch.Tensor`): Ids `[B, T]`, each row from its first token on. What stands behind a row's length is
            anything.
        lengths (`list[int]` or `torch.Tensor`): Tokens of each row, or `[B, 1]` that only the device knows: the host
            waits for these if it is asked for them.
        rows (`list[int]` or `torch.Tensor`): Which row of the batch that `generate` was given each one is, or `[B, 1]`
            that only the device knows.
    """

    def __init__(self, ids: torch.Tensor, lengths: list[int] | torch.Tensor, rows: list[int] | torch.Tensor):
        self.ids = ids
        self._lengths = lengths
        self._rows = rows

    @classmethod
    def of(cls, ids: torch.Tensor) -> Prefixes:
        """All rows of a batch `[B, T]`, equally long."""
        return cls(ids, [ids.shape[1]] * len(ids), list(range(len(ids))))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        if isinstance(self._lengths, list):
            return self._lengths
        return self._lengths[:, 0].tolist()

    @cached_property
    def rows(self) -> list[int]:
        """Which row of the batch that `generate` was given each one is."""
        if isinstance(self._rows, list):
            return self._rows
        return self._rows[:, 0].tolist()

    @property
    def is_even(self) -> bool:
        """Whether all rows are known to be equally long."""
        return isinstance(self._lengths, list) and min(self._lengths) == max(self._lengths)

    @property
    def longest(self) -> int:
        """How many columns the texts take up at most."""
        if isinstance(self._lengths, list):
            return max(self._lengths)
        return self.ids.shape[1]

    @property
    def ends(self) -> torch.Tensor:
        """Tokens of each row, `[B, 1]` beside the ids."""
        if isinstance(self._lengths, list):
            return self.per_row(self._lengths)
        return self._lengths

    def of_rows(self, values: list[int], held: torch.Tensor | None) -> torch.Tensor:
        """The value of each one's row, `[B, 1]`: of values for the rows of the batch, or of the same on the device."""
        if isinstance(self._rows, list):
            return self.per_row([values[row] for row in self._rows])
        assert held is not None
        return held[self._rows]

    def within(self, lengths: range, bounds: torch.Tensor | None) -> torch.Tensor | None:
        """Which rows are of some lengths, `[B, 1]` bool, by their bounds `[2]` on the device; None for surely none."""
        if isinstance(self._lengths, list):
            are = [length in lengths for length in self._lengths]
            return self.per_row(are) if any(are) else None
        first, end = (lengths.start, lengths.stop) if bounds is None else bounds
        return (first <= self._lengths) & (self._lengths < end)

    def packed(self, capacity: int) -> torch.Tensor:
        """All of it in one shape, `[B, 2 + capacity]`: of each its row, its number of tokens, its ids, and anything."""
        length = self.longest
        text = torch.nn.functional.pad(self.ids[:, :length], (2, capacity - length))
        text[:, :1] = self.per_row(self.rows)
        text[:, 1:2] = self.ends
        return text

    @classmethod
    def unpacked(cls, text: torch.Tensor) -> Prefixes:
        """The prefixes that were packed to `[B, 2 + capacity]`."""
        return cls(text[:, 2:], text[:, 1:2], text[:, :1])

    def last(self) -> torch.Tensor:
        """The last token of each row, `[B, 1]`."""
        return self.endings(1)

    def endings(self, count: int) -> torch.Tensor:
        """The last `count` tokens of each row, `[B, count]`; of a shorter row anything."""
        if self.is_even and count <= (length := self.lengths[0]):
            return self.ids[:, length - count : length]
        if not self.ids.shape[1]:  # a prompt of embeddings alone
            return self.ids.new_zeros(len(self.ids), count)
        columns = self.ends - count + torch.arange(count, device=self.ids.device)
        return self.ids.gather(1, columns.clamp_min(0))

    def per_row(self, values: list) -> torch.Tensor:
        """One value of the host for each row, `[B, 1]` beside the ids, without waiting for their device."""
        if len(set(values)) == 1:  # nothing to copy there
            return torch.full((len(values), 1), values[0], device=self.ids.device)
        return torch.tensor(values)[:, None].to(self.ids.device, non_blocking=True)

    def between(self, starts: torch.Tensor | int) -> torch.Tensor:
        """Which ids belong to each row's text, from a place on, or a place of each `[B, 1]`: `[B, T]` bool."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        where = columns < self.ends
        if isinstance(starts, int) and not starts:
            return where
        return where & (columns >= starts)

    def foreseen(self, num_positions: int) -> Prefixes:
        """Texts that successive positions see, the last known token in place of those yet to be chosen."""
        return self.along(self.last().expand(-1, num_positions - 1), num_positions)

    def of_lengths(self, lengths: torch.Tensor) -> Prefixes:
        """The same texts, of other lengths `[B, 1]`."""
        return Prefixes(self.ids, lengths, self._rows)

    def branches(self, count: int) -> Prefixes:
        """So many texts that begin with each row, those of the first row first."""
        if count == 1:
            return self
        return self._behind(self.ids, count)

    def along(self, continuation: torch.Tensor, num_positions: int) -> Prefixes:
        """Texts that successive positions see: the last one all of a continuation, each one before it a token less.

        Args:
            continuation (`torch.Tensor`): Tokens behind the prefixes, `[B, M]`.
            num_positions (`int`): Positions of each row (N), at most M + 1.

        Returns:
            [`Prefixes`]: B * N of them, the positions of the first row first.
        """
        if num_positions == 1 and not continuation.shape[1]:
            return self
        first = continuation.shape[1] - num_positions + 1
        return self._behind(self._joined(continuation), num_positions, first, 1)

    def _behind(self, ids: torch.Tensor, count: int, first: int = 0, step: int = 0) -> Prefixes:
        """So many texts of each row: longer than it by `first` tokens, and by `step` more from one to the next."""
        if isinstance(lengths := self._lengths, list):
            lengths = [length + first + step * index for length in lengths for index in range(count)]
        else:
            lengths = (lengths + first + step * torch.arange(count, device=lengths.device)).view(-1, 1)
        rows: list[int] | torch.Tensor
        if isinstance(self._rows, list):
            rows = [row for row in self._rows for _ in range(count)]
        else:
            rows = self._rows.repeat_interleave(count, dim=0)
        return Prefixes(ids.repeat_interleave(count, dim=0), lengths, rows)

    def _joined(self, continuation: torch.Tensor) -> torch.Tensor:
        """Ids `[B, T + M]` with tokens `[B, M]` behind each row's length."""
        ids = torch.cat((self.ids[:, : self.longest], continuation), dim=1)
        if self.is_even:
            return ids
        return ids.scatter(1, self.ends + torch.arange(continuation.shape[1], device=ids.device), continuation)
