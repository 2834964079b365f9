"""A DFlash twin in the shape that Transformers' own DFlash loop expects, to measure that loop with the same weights.

Transformers drafts from `last_hidden_state[:, 1:]`, keeps a cache of its own and hands the hidden states over already
joined. Here the context is kept by us, and the block is moved one place where the twin's first position predicts.

Shapes: C new context positions, K block size, L captured layers, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import generation
from transformers.modeling_outputs import BaseModelOutput

from hf_domino._common.cache_name import CACHE
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.context import ContextCache

_CONTEXT = "_hf_domino_context"  # attribute of Transformers' cache: one generation, one context


def has_native_dflash() -> bool:
    """Whether the installed Transformers has a DFlash loop."""
    return hasattr(generation, "DFlashTokenCandidateGenerator")


class NativeDFlash(nn.Module):
    """Pass it as `assistant_model` with `speculation_type="dflash"`.

    Args:
        twin ([`DominoDraftModel`]): A drafter; its correction head, if it has one, is not used.
    """

    def __init__(self, twin: DominoDraftModel):
        super().__init__()
        self.twin = twin

    @property
    def config(self) -> Any:
        """The twin's: layers to capture, block size and mask token."""
        return self.twin.config

    @property
    def device(self) -> torch.device:
        """Where the hidden states are wanted."""
        return self.twin.device

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """Draft one block.

        Args:
            noise_embeds (`torch.Tensor`): Target embeddings of anchor and masks, `[1, K, H]`.
            context_hidden_states (`torch.Tensor`): Hidden states of the positions just committed, `[1, C, L * H]`.
            position_ids (`torch.Tensor`): Absolute positions of context and block, `[1, C + K]`.
            attention_mask (`torch.Tensor`, *optional*): Not read: of a single sequence all positions count.
            kwargs: The `DFlashCache`, which marks the generation; its own layers are not used.

        Returns:
            `BaseModelOutput`: `last_hidden_state` `[1, P + 1, H]`; the first position is one that Transformers drops.
        """
        cache = kwargs[CACHE]
        context = getattr(cache, _CONTEXT, None)
        if context is None:
            context = ContextCache(len(self.twin.layers))
            setattr(cache, _CONTEXT, context)
            cache.layers = []  # before 5.23 layers that were never written to cannot be cropped
        num_new = context_hidden_states.shape[1]
        hidden = self.twin(
            noise_embeds.to(self.device),
            position_ids[:, num_new:],
            self.twin.fuse_context((context_hidden_states,)),
            position_ids[:, :num_new],
            cache=context,
        )
        if self.config.shift_label:
            hidden = torch.cat((hidden[:, :1], hidden), dim=1)  # [1, K + 1, H]
        return BaseModelOutput(last_hidden_state=hidden)
