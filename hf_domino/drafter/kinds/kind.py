"""What is asked of a kind of drafter: all that decoding, trees, caches, training and measurements know of one.

A kind turns what it reads of the target into draft hidden states, one for each proposal, of which the target's lm_head
makes base logits. Those are a law of each position by itself; a correction head, where there is one, makes the law of
a path of them, and is called as Domino's is.

Shapes: B batch, S sequence length, C context positions, N blocks per row, K block size, P proposals, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hf_domino.target.view import TargetModel


class Kind(ABC):
    """A kind of drafter, made where it is asked for: weights and configuration are the drafter's.

    Args:
        drafter (`DominoDraftModel`): A drafter of this kind.
    """

    def __init__(self, drafter: Any):
        self.drafter, self.config = drafter, drafter.config

    @abstractmethod
    def build(self) -> None:
        """Give the drafter its weights, which the kind's [`~configuration.kinds.KindFacts`] describes."""

    @abstractmethod
    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Context features `[B, C, H]` of L hidden states `[B, C, H]`, position by position."""

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the weights. What is given is the kind's own affair: it is called by the methods below."""

    @abstractmethod
    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_positions: torch.Tensor | None,
        cache: Any,
        counts: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Store new context, and draft behind the anchors, which have seen all of it.

        Args:
            target (`TargetModel`): For embeddings.
            anchors (`torch.Tensor`): Tokens `[B, 1]`; `[B, 0]` to store the context alone.
            positions (`torch.Tensor`): Of the anchors, `[B, 1]`.
            features (`torch.Tensor`, *optional*): New context `[B, C, H]`.
            feature_positions (`torch.Tensor`, *optional*): Its positions `[B, C]`.
            cache (`ContextCache` or `FixedContext`): Of the sizes that the kind's facts say.
            counts (`Sequence[int]`, *optional*): How much of each row's new context is valid, the first positions.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, P, H]`, or `[B, 0, H]`.
        """

    @abstractmethod
    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draft behind many anchors of known text side by side, each as [`~Kind.draft`] does.

        Args:
            target (`TargetModel`): For embeddings.
            input_ids (`torch.Tensor`): `[B, S]`.
            features (`torch.Tensor`, *optional*): Context `[B, C, H]` of the first C positions, enough to reach all
                anchors; None to draft without any context.
            anchors (`torch.Tensor`): Positions `[B, N]`, -1 where a row has fewer; increasing ones are the fastest.
            position_ids (`torch.Tensor`, *optional*): `[B, S]`, from 0 on in each of the rows that were packed into
                one, of which a block sees its own only. Defaults to one row.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, N, K, H]`; proposals are those from `label_offset` on.
        """
