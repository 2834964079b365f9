"""The interface of a drafting method: the hooks that decoding, training and evaluation call on a drafter.

Most methods produce one draft hidden state per proposal, and lm_head turns each of them into base logits, a
distribution that does not depend on the other proposals. A correction head then makes each distribution depend on the
tokens chosen before it. Other methods read their own drafts: `draft` returns a single draft hidden state, the one
after the anchor, and their scorer computes the states after the tokens chosen from there on.

Shapes: B batch, S sequence length, C context positions, N blocks per sequence, K block size, P proposals, H hidden
size, D tokens that can be drafted, L branches or captured target layers, M successors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_domino.methods.context import ContextCache, NewContext
from hf_domino.methods.correction import CorrectionHead, HeadScorer
from hf_domino.methods.scorer import Scorer
from hf_domino.targets.view import TargetModel


class DraftingMethod:
    """The hooks of a method. A method overrides every hook without a default, unless none of its features calls it."""

    config: Any

    def build(self) -> None:
        """Create the drafter's modules and parameters from `self.config`."""
        raise NotImplementedError

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse target hidden states into context features.

        Args:
            hidden_states (`Sequence[torch.Tensor]`): L tensors `[B, C, H]`, the outputs of `config.target_layer_ids`,
                or all of them joined, `[B, C, L * H]`.

        Returns:
            `torch.Tensor`: Context features `[B, C, H]` in the drafter's dtype.
        """
        raise NotImplementedError

    def draft_states(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers; this is the model's forward. Each method defines its own arguments."""
        raise NotImplementedError

    def store(self, new: NewContext, cache: Any) -> None:
        """Store new context without drafting, after rounds that drafted nothing.

        Args:
            new ([`NewContext`]): The new context.
            cache ([`DraftContext`]): The cache from `new_context`, or a context of fixed shape.
        """
        raise NotImplementedError

    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        new: NewContext | None,
        cache: Any,
        last_tokens: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Store new context, then draft from the anchors, which see all of the stored context.

        Args:
            target (`TargetModel`): Provides the token embeddings.
            anchors (`torch.Tensor`): Tokens `[B, 1]`.
            positions (`torch.Tensor`): Positions of the anchors, `[B, 1]`.
            new ([`NewContext`], *optional*): New context; None if there is none.
            cache ([`DraftContext`]): The cache from `new_context`, or a context of fixed shape.
            last_tokens (`Callable`, *optional*): Takes a number n and returns the last n tokens of each sequence,
                `[B, n]`: the tokens that follow the last n context positions. The last of them are the anchors.

        Returns:
            `torch.Tensor`: Draft hidden states: `[B, P, H]`, or `[B, 1, H]` if its scorer is not parallel.
        """
        raise NotImplementedError

    def scorer(self, target: TargetModel, reads_host: bool = True) -> Scorer:
        """Create the scorer of a call, which scores the tokens that can follow the paths of each round.

        Args:
            target (`TargetModel`): Provides the embeddings and the lm_head.
            reads_host (`bool`, *optional*, defaults to `True`): Whether tokens may be read on the host, which a
                captured function may not do.
        """
        if self.head is None:
            return Scorer(self, target)
        return HeadScorer(self, target, reads_host)

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        """Compute base logits `[..., D]` in fp32 from draft hidden states `[..., H]`, on the device of the states."""
        raise NotImplementedError

    @property
    def head(self) -> CorrectionHead | None:
        """The head that corrects the drafts token by token; None if the method uses them as they are."""
        return None

    def head_parameters(self) -> list[nn.Parameter]:
        """The drafter's own weights that turn draft hidden states into logits; the target's lm_head is not included."""
        return []

    def confidence(self, draft_hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Predict how likely the target is to accept each draft; None if the drafter has no weights for this.

        Args:
            draft_hidden (`torch.Tensor`): Draft hidden states of the drafts, `[N, H]`.
            token_ids (`torch.Tensor`): The token before each draft, `[N]`.

        Returns:
            `torch.Tensor`, *optional*: Probabilities `[N]`.
        """
        return None

    def new_context(self) -> ContextCache:
        """Create an empty context cache."""
        return ContextCache(self.config.num_hidden_layers, self.config.draft_window_size)

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """Draft from many anchors of existing text in parallel, from each one as `draft` does.

        Args:
            target (`TargetModel`): Provides the token embeddings.
            input_ids (`torch.Tensor`): `[B, S]`.
            features (`torch.Tensor`, *optional*): Context features `[B, C, H]` of the first C positions, which must
                reach all anchors; None to draft without any context.
            anchors (`torch.Tensor`): Positions `[B, N]`, padded with -1 if a sequence has fewer than N. Ascending
                positions are the fastest.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, N, K, H]`. The proposals start at block position `label_offset`.
        """
        raise NotImplementedError

    def learn(self, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Learn from the target's logits at tokens; only for methods that learn as they draft.

        Nothing changes until the result is passed to `keep`, so each of the two can be run again.

        Args:
            tokens (`torch.Tensor`): The tokens `[N]`.
            before (`torch.Tensor`): The token before each of them, `[N]`.
            logits (`torch.Tensor`): The logits for the token after each of them, `[N, V]`.

        Returns:
            `tuple`: What to keep, tensors `[N, ...]`.
        """
        raise NotImplementedError

    def keep(self, *learnt: torch.Tensor) -> None:
        """Keep what [`~DraftingMethod.learn`] has returned; the tensors can have any number of first dimensions."""
        raise NotImplementedError
