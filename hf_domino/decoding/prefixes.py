"""The tokens so far of every sequence, and the text that each position of a block sees.

Shapes: B sequences, T tokens so far, N positions, M tokens after the prefix.
"""

from __future__ import annotations

from functools import cached_property

import torch


class Prefixes:
    """The tokens so far of unfinished sequences, which can differ in length.

    Args:
        ids (`torch.Tensor`): Token ids `[B, T]`. Each sequence begins in the first column, and the values after its
            length are arbitrary.
        lengths (`list[int]` or `torch.Tensor`): The number of tokens of each sequence. It is a tensor `[B, 1]` if only
            the device knows the numbers; reading `lengths` then makes the host wait for them.
        rows (`list[int]` or `torch.Tensor`): The index of each sequence in the batch that was passed to `generate`. It
            is a tensor `[B, 1]` if only the device knows the indices.
    """

    def __init__(self, ids: torch.Tensor, lengths: list[int] | torch.Tensor, rows: list[int] | torch.Tensor):
        self.ids = ids
        self._lengths = lengths
        self._rows = rows
        if isinstance(lengths, list):
            self.lengths = lengths
        if isinstance(rows, list):
            self.rows = rows

    @classmethod
    def of(cls, ids: torch.Tensor) -> Prefixes:
        """The prefixes of a whole batch `[B, T]`, whose sequences are equally long."""
        return cls(ids, [ids.shape[1]] * len(ids), list(range(len(ids))))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence, on the host."""
        assert isinstance(self._lengths, torch.Tensor)
        return self._lengths[:, 0].tolist()

    @cached_property
    def rows(self) -> list[int]:
        """The index of each sequence in the batch that was passed to `generate`, on the host."""
        assert isinstance(self._rows, torch.Tensor)
        return self._rows[:, 0].tolist()

    @property
    def is_even(self) -> bool:
        """Whether the host knows that all sequences are equally long."""
        return isinstance(self._lengths, list) and min(self._lengths) == max(self._lengths)

    @property
    def longest(self) -> int:
        """How many columns the texts occupy at most."""
        if isinstance(self._lengths, list):
            return max(self._lengths)
        return self.ids.shape[1]

    @property
    def ends(self) -> torch.Tensor:
        """The number of tokens of each sequence, `[B, 1]` on the device of the ids."""
        if isinstance(self._lengths, list):
            return self.per_row(self._lengths)
        return self._lengths

    def of_rows(self, values: list[int], held: torch.Tensor | None) -> torch.Tensor:
        """Choose each sequence's value, `[B, 1]`, from values of the whole batch; `held` has them on the device."""
        if isinstance(self._rows, list):
            return self.per_row([values[row] for row in self._rows])
        assert held is not None
        return held[self._rows]

    def within(self, lengths: range, bounds: torch.Tensor | None) -> torch.Tensor | None:
        """Which sequences have one of these lengths, `[B, 1]` bool; None if the host can tell that none has.

        Args:
            lengths (`range`): The lengths.
            bounds (`torch.Tensor`, *optional*): Start and stop of the range on the device, `[2]`.
        """
        if isinstance(self._lengths, list):
            are = [length in lengths for length in self._lengths]
            return self.per_row(are) if any(are) else None
        first, end = (lengths.start, lengths.stop) if bounds is None else bounds
        return (first <= self._lengths) & (self._lengths < end)

    def packed(self, capacity: int) -> torch.Tensor:
        """Pack each sequence's index, length and ids into one tensor of fixed shape, `[B, 2 + capacity]`."""
        length = self.longest
        text = torch.nn.functional.pad(self.ids[:, :length], (2, capacity - length))
        text[:, :1] = self.per_row(self.rows)
        text[:, 1:2] = self.ends
        return text

    @classmethod
    def unpacked(cls, text: torch.Tensor) -> Prefixes:
        """The prefixes that were packed into a tensor `[B, 2 + capacity]`."""
        return cls(text[:, 2:], text[:, 1:2], text[:, :1])

    def last(self) -> torch.Tensor:
        """The last token of each sequence, `[B, 1]`."""
        return self.last_tokens(1)

    def last_tokens(self, count: int) -> torch.Tensor:
        """The last `count` tokens of each sequence, `[B, count]`; arbitrary values if a sequence is shorter."""
        if self.is_even and count <= (length := self.lengths[0]):
            return self.ids[:, length - count : length]
        if not self.ids.shape[1]:  # the prompt consists of embeddings alone
            return self.ids.new_zeros(len(self.ids), count)
        columns = self.ends - count + torch.arange(count, device=self.ids.device)
        return self.ids.gather(1, columns.clamp_min(0))

    def per_row(self, values: list) -> torch.Tensor:
        """Move one value per sequence to the device of the ids, `[B, 1]`, without waiting for the device."""
        if len(set(values)) == 1:  # this needs no copy
            return torch.full((len(values), 1), values[0], device=self.ids.device)
        return torch.tensor(values)[:, None].to(self.ids.device, non_blocking=True)

    def between(self, starts: torch.Tensor | int) -> torch.Tensor:
        """Which columns belong to each sequence's text from index `starts` on, `[B, T]` bool.

        Args:
            starts (`torch.Tensor` or `int`): The first index, the same for all sequences or one for each, `[B, 1]`.
        """
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        where = columns < self.ends
        if isinstance(starts, int) and not starts:
            return where
        return where & (columns >= starts)

    def foreseen(self, num_positions: int) -> Prefixes:
        """The texts that successive positions will see, with the last token in place of those yet to be chosen."""
        return self.along(self.last().expand(-1, num_positions - 1), num_positions)

    def of_lengths(self, lengths: torch.Tensor) -> Prefixes:
        """The same texts with other lengths `[B, 1]`."""
        return Prefixes(self.ids, lengths, self._rows)

    def branches(self, count: int) -> Prefixes:
        """Repeat each sequence `count` times; the copies of the first sequence come first."""
        if count == 1:
            return self
        return self._behind(self.ids, count)

    def along(self, continuation: torch.Tensor, num_positions: int) -> Prefixes:
        """The texts that successive positions see: the last one sees the whole continuation, each other one less.

        Args:
            continuation (`torch.Tensor`): Tokens that follow the prefixes, `[B, M]`.
            num_positions (`int`): Number of positions of each sequence (N), at most M + 1. Each sees one token more
                than the position before it.

        Returns:
            [`Prefixes`]: B * N texts, beginning with those of the first sequence.
        """
        if num_positions == 1 and not continuation.shape[1]:
            return self
        first = continuation.shape[1] - num_positions + 1
        return self._behind(self._joined(continuation), num_positions, first, 1)

    def _behind(self, ids: torch.Tensor, count: int, first: int = 0, step: int = 0) -> Prefixes:
        """Make `count` texts of each sequence, the first `first` tokens longer and each next one `step` tokens more."""
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
        """The ids `[B, T + M]` with the tokens `[B, M]` placed after the end of each sequence."""
        ids = torch.cat((self.ids[:, : self.longest], continuation), dim=1)
        if self.is_even:
            return ids
        return ids.scatter(1, self.ends + torch.arange(continuation.shape[1], device=ids.device), continuation)
