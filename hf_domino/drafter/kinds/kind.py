"""What is asked of a kind of drafter: all that decoding, trees, caches, training and measurements know of one.

A kind turns what it reads of the target into draft hidden states, one for each proposal, of which lm_head makes base
logits. Those are a law of each position by itself; a correction head, where there is one, makes the law of a path of
them, and is called as Domino's is. Or a kind reads its own drafts: then there is one draft hidden state behind the
anchors, and its [`Branches`] give those behind what was chosen.

Shapes: B batch, S sequence length, C context positions, N blocks per row, K block size, P proposals, H hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_domino.drafter.context import ContextCache
from hf_domino.target.view import TargetModel


class Branches(ABC):
    """Lanes of a round, of a kind that reads its own drafts. What it knows of them is never in the context's cache."""

    @abstractmethod
    def advance(self, lanes: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Go on with lanes behind these `[B, L]`, each by a token `[B, L]`: draft hidden states `[B, L, H]`."""


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
        endings: Callable[[int], torch.Tensor] | None = None,
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
            endings (`Callable`, *optional*): Gives the last tokens of the texts, so many of each row: what stands
                behind the last positions of the context, the anchors behind the last.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, P, H]`, or `[B, 0, H]`; `[B, 1, H]` where there are [`Branches`].
        """

    def branches(
        self, target: TargetModel, hidden: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> Branches | None:
        """The lanes of a round behind what [`~Kind.draft`] gave.

        Args:
            target (`TargetModel`): For embeddings.
            hidden (`torch.Tensor`): Draft hidden states `[B, 1, H]`.
            positions (`torch.Tensor`): Of the anchors, `[B, 1]`.
            cache ([`ContextCache`]): With all that stands before the anchors; nothing is left in it.

        Returns:
            [`Branches`], *optional*: None where drafts do not read each other.
        """
        return None

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `[..., D]` in fp32 of draft hidden states `[..., H]`, beside these."""
        return self.drafter.vocabulary.logits(target, hidden)

    def head_parameters(self) -> list[nn.Parameter]:
        """Weights that turn draft hidden states into logits, beside the target's lm_head."""
        return []

    def new_context(self) -> ContextCache:
        """An empty cache of its context."""
        return ContextCache(self.config.kind.context(self.config)[0])

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
