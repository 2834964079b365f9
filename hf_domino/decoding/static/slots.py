"""The target's keys and values in slots of fixed shape, so that the target's forward can be captured.

The cache never grows during a round: a round only moves its lengths.

Shapes: B sequences still generated, C accepted positions, W positions of a verification forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from hf_domino.decoding.caches import TargetCache, shortened_cache
from hf_domino.decoding.round import fitting_length
from hf_domino.decoding.static.fixed_cache import set_first
from hf_domino.decoding.static.workspace import Workspace


class SlotCache(TargetCache):
    """Slots of fixed shape; what follows a sequence's length is never read, so nothing needs to be dropped.

    Args:
        workspace ([`Workspace`]): Has the slots.
        num_draft_tokens (`int`): The most tokens that a chain drafts.
        room (`tuple[int, int]`): Positions of the largest block, and of the longest text with it.
        config (`PreTrainedConfig`, *optional*): The target's, if the caller gets a cache, as a copy that grows.
    """

    cache: Any
    ends_with_block = False

    def __init__(self, workspace: Workspace, num_draft_tokens: int, room: tuple[int, int], config: Any = None):
        self._workspace = workspace
        self._slots = workspace.cache
        self.cache = workspace.cache
        self._most = num_draft_tokens
        self._widest, self._longest = room
        self._config = config
        self._mask: torch.Tensor | None = None  # [1, capacity], only for a single sequence
        self.lengths = []  # the host's copy of the slots' lengths

    @property
    def starts_differ(self) -> bool:  # type: ignore[override]
        """Whether there are several sequences, which fill different numbers of slots."""
        return self._slots.is_batch

    @property
    def num_columns(self) -> int:
        """How many slots the longest sequence fills."""
        return max(self.lengths)

    def settle(self, length: int) -> None:
        """Count the positions that a forward has written."""
        self._move_to([length])

    def begin(self, lengths: list[int], mask: torch.Tensor | None, device: torch.device) -> None:
        """Take over the prompts; the mask `[1, T]` of a single one is extended to all slots."""
        self._move_to(lengths)
        capacity = self._workspace.capacity
        if (found := self._slots.num_slots()) < capacity:
            raise shortened_cache(capacity, found)
        if self.starts_differ:
            return
        whole = torch.ones(1, capacity, dtype=torch.long, device=device)
        if mask is not None:
            whole[:, : lengths[0]] = mask
        self._mask = self._workspace.hold("attention_mask", whole)

    def reserve(self, lengths: Sequence[int]) -> None:
        """Make room for the next block after texts of these lengths; buffers only move here."""
        num_positions = max(*self.lengths, *lengths) + self._widest
        if self._workspace.reserve(num_positions, self._longest) and self._mask is not None:
            missing = self._workspace.capacity - self._mask.shape[1]
            self._mask = self._workspace.hold(
                "attention_mask", torch.nn.functional.pad(self._mask, (0, missing), value=1)
            )

    def open_block(self, num_checked: int) -> int:
        """Begin a forward over a block; a chain is padded to one of a few widths, or to one of two if compiled."""
        self._slots.begin_forward()
        num_proposed = num_checked - 1
        # Prompt lookup can propose as many tokens as a tree has.
        most = self._most if num_proposed <= self._most else self._widest - 1
        if self._workspace.is_compiled:  # wider blocks read the same weights
            return 1 + most
        return 1 + fitting_length(num_proposed, most)

    def starts(self, num_rows: int) -> torch.Tensor:
        """How many slots the sequences fill, `[B, 1]`."""
        return self._slots.lengths[:num_rows, None]

    def mask(self, width: int) -> torch.Tensor | None:
        """The padding mask of all slots, `[1, capacity]`; None for a batch."""
        return self._mask

    def follow(self, path: torch.Tensor, num_checked: int) -> None:
        """Move the accepted path of a tree to the front of its block."""
        path = torch.nn.functional.pad(path.to(self._slots.lengths.device), (0, self._most + 1 - path.shape[1]))
        self._slots.reserve(path.shape[1])
        self._workspace.run(self._slots.take, path)
        self._workspace.run(self._slots.put, path)

    def keep(
        self, counts: Sequence[int], num_checked: int, rows: Sequence[int], run_again: Callable[[int], None]
    ) -> None:
        """Advance the lengths past the committed positions, and move the sequences that stay to the front."""
        self._move_to([length + count for length, count in zip(self.lengths, counts, strict=True)])
        if 0 < len(rows) < len(self.lengths):
            self._slots.select(rows)
            # Padding sequences stay at position 0, which every target has.
            self._slots.lengths[len(rows) :].zero_()
            self.lengths = [self.lengths[row] for row in rows]

    def end(self, batch_size: int) -> None:
        """Leave a cache that the caller can continue from, if the caller gets one."""
        if self._config is None:
            return
        if batch_size == 1:
            self.cache = self._slots.to_dynamic(self._config)
        else:  # empty, like the cache that a growing batch leaves
            self.cache = DynamicCache(config=self._config)

    def _move_to(self, lengths: list[int]) -> None:
        self.lengths = lengths
        set_first(self._slots.lengths, lengths)
