"""What every method of drafting answers: the hooks of a drafter's class that decoding, training and evaluation call.

Most methods have draft hidden states, one for each proposal, of which lm_head makes base logits: a distribution of each
position by itself. A correction head makes the distribution along a path. Or a method reads its own drafts: then there
is one draft hidden state behind the anchors, and `branches` gives those behind the tokens that were chosen.

Shapes: B batch, S sequence length, C context positions, N blocks per sequence, K block size, P proposals, H hidden
size, D tokens that are drafted, L branches, or layers of the target that are read, M successors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_domino.methods.context import ContextCache, NewContext
from hf_domino.methods.correction import CorrectionHead

if TYPE_CHECKING:
    from hf_domino.target.view import TargetModel

# Goes on with branches behind these `[B, L]`, each by a token `[B, L]`: draft hidden states `[B, L, H]`. What it knows
# of a round's branches is never in the context's cache.
Branches = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class DraftingMethod:
    """The hooks of a method. What has no default must be given by each method that does not lack its use."""

    config: Any

    def build(self) -> None:
        """Give the drafter its modules and parameters, from `self.config`."""
        raise NotImplementedError

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse target hidden states into context features.

        Args:
            hidden_states (`Sequence[torch.Tensor]`): L tensors `[B, C, H]`, the outputs of `config.target_layer_ids`.

        Returns:
            `torch.Tensor`: Context features `[B, C, H]` in the drafter's dtype.
        """
        raise NotImplementedError

    def draft_states(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers on arguments of the method's own, as its `draft` gives them; this is the model's forward."""
        raise NotImplementedError

    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        new: NewContext | None,
        cache: Any,
        endings: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Store new context, and draft behind the anchors, which have seen all of it.

        Args:
            target (`TargetModel`): For embeddings.
            anchors (`torch.Tensor`): Tokens `[B, 1]`; `[B, 0]` to store the context alone.
            positions (`torch.Tensor`): Positions of the anchors, `[B, 1]`.
            new ([`NewContext`], *optional*): New context, of which there may be none.
            cache (`ContextCache` or `FixedContext`): What `new_context` gave, or a context of fixed shape.
            endings (`Callable`, *optional*): Gives the last tokens of the texts, so many of each sequence: what stands
                behind the last positions of the context, the anchors behind the last.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, P, H]`, or `[B, 0, H]`; `[B, 1, H]` of a method with `branches`.
        """
        raise NotImplementedError

    def branches(
        self, target: TargetModel, hidden: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> Branches | None:
        """The branches of a round behind what `draft` gave `[B, 1, H]`; None where drafts do not read each other."""
        return None

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `[..., D]` in fp32 of draft hidden states `[..., H]`, on their device."""
        raise NotImplementedError

    @property
    def head(self) -> CorrectionHead | None:
        """What corrects its drafts token by token; None where they are taken as they are."""
        return None

    def head_parameters(self) -> list[nn.Parameter]:
        """Weights that turn draft hidden states into logits, beside the target's lm_head."""
        return []

    def confidence(self, draft_hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Chances `[N]` that drafts of these `[N, H]` behind tokens `[N]` are accepted, where weights tell them."""
        return None

    def new_context(self) -> ContextCache:
        """An empty cache of its context."""
        return ContextCache(self.config.num_hidden_layers, self.config.draft_window_size)

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """Draft behind many anchors of known text side by side, each as `draft` does.

        Args:
            target (`TargetModel`): For embeddings.
            input_ids (`torch.Tensor`): `[B, S]`.
            features (`torch.Tensor`, *optional*): Context `[B, C, H]` of the first C positions, enough to reach all
                anchors; None to draft without any context.
            anchors (`torch.Tensor`): Positions `[B, N]`, -1 where a sequence has fewer; increasing ones are the
                fastest.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, N, K, H]`; proposals are those from `label_offset` on.
        """
        raise NotImplementedError

    def learn(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Learn from what the target made of verified tokens `[N]`: logits `[N, V]`, where it learns as it drafts."""
        raise NotImplementedError

    def successors_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and scores `[..., M]` of what may follow tokens `[...]`, of a method that learns as it drafts."""
        raise NotImplementedError
