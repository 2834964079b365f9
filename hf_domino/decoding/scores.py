"""The scores that effects change: those of the whole vocabulary, or those of a few candidates of each position.

Shapes: R positions, C tokens that change at each, M candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

NewScores = Callable[..., torch.Tensor]  # returns new scores, given old scores and further values


class Scores:
    """A copy of the scores of all tokens, for effects to change.

    Args:
        scores (`torch.Tensor`): Scores `[R, V]`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): The dtype of the copy.
    """

    def __init__(self, scores: torch.Tensor, dtype: torch.dtype = torch.float32):
        self._shape = scores.shape
        self.vocab_size = scores.shape[1]
        self._flat = torch.empty(scores.numel() + 1, dtype=dtype, device=scores.device)
        self.tensor.copy_(scores)
        # The extra last element receives the writes for tokens that have no score or are not to change. Assigning to a
        # slice, not to one element, needs no copy from the host.
        self._flat[-1:] = 0.0

    @property
    def tensor(self) -> torch.Tensor:
        """The scores as they are now, `[R, V]`."""
        return self._flat[:-1].view(self._shape)

    def change(self, ids: torch.Tensor, where: torch.Tensor | None, new: NewScores, *values: torch.Tensor) -> None:
        """Replace the scores of some tokens; ids without a score are ignored.

        Args:
            ids (`torch.Tensor`): The tokens `[R, C]`, or `[C]` for the same ones at all positions. If a token occurs
                twice at a position, both must get the same score.
            where (`torch.Tensor`, *optional*): Which of them to change, `[R, C]` or `[R, 1]` bool; None for all.
            new (`Callable`): Returns new scores, given the old ones `[R, C]` and `values`.
            values (`torch.Tensor`): Further arguments of `new`, `[R, C]` or `[R, 1]`.
        """
        num_positions, width = self._shape
        columns, is_meant = self._columns(ids.expand(num_positions, -1))
        if where is not None:
            is_meant = is_meant & where
        offsets = width * torch.arange(num_positions, device=ids.device)[:, None]
        index = torch.where(is_meant, offsets + columns, num_positions * width)  # [R, C]
        changed = new(self._flat[index], *values).to(self._flat)
        self._flat.scatter_(0, index.flatten(), changed.flatten())

    def add(self, amounts: torch.Tensor) -> None:
        """Add an amount `[R, V]` to the score of each token."""
        self.tensor.add_(amounts)

    def forbid_all(self, where: torch.Tensor) -> None:
        """Forbid all tokens at the positions where `where` `[R, 1]` is true."""
        self.tensor.masked_fill_(where, -torch.inf)

    def _columns(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The column of each token's score, and whether it has one, `[R, C]` each."""
        return ids, (ids >= 0) & (ids < self.vocab_size)


class CandidateScores(Scores):
    """A copy of the scores of a few candidates of each position.

    Args:
        scores (`torch.Tensor`): Scores `[R, M]`.
        vocab_size (`int`): Size of the whole vocabulary (V).
        token_ids (`torch.Tensor`): The ids of the candidates, `[R, M]`.
    """

    def __init__(self, scores: torch.Tensor, vocab_size: int, token_ids: torch.Tensor):
        super().__init__(scores)
        self.vocab_size = vocab_size
        self._token_ids = token_ids

    @cached_property
    def _ordered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of the candidates in ascending order, and the column of each."""
        token_ids, order = self._token_ids.sort(dim=1)
        return token_ids, order

    def add(self, amounts: torch.Tensor) -> None:
        """Add an amount `[R, V]` to the score of each token."""
        token_ids, order = self._ordered
        self.tensor.scatter_add_(1, order, amounts.gather(1, token_ids))

    def _columns(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = ids.contiguous()
        (token_ids, order) = self._ordered
        rank = torch.searchsorted(token_ids, ids).clamp_max(token_ids.shape[1] - 1)
        return order.gather(1, rank), token_ids.gather(1, rank) == ids
