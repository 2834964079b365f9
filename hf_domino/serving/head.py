"""Run the correction head along the blocks of a batch, for a server that chooses the likeliest tokens itself.

vLLM asks for the logits of all proposals at once. So this module chooses the tokens that the head reads, and returns
logits whose argmax are these tokens, so that the server chooses the same ones.

Shapes: B requests, P proposals, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_domino.methods.domino import DominoHead, DominoMethodConfig


class BlockHead(nn.Module, DominoHead):
    """A correction head, with the tensor names of the released drafters."""

    def __init__(self, config: DominoMethodConfig):
        super().__init__()
        self.config = config
        self.build_head(config, config.vocab_size)

    def forward(
        self,
        base_logits: torch.Tensor,
        draft_hidden: torch.Tensor,
        anchors: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Correct full blocks, so that the argmax at each position is the proposal after the proposals before it.

        Args:
            base_logits (`torch.Tensor`): Base logits `[B, P, V]`, minus infinity for tokens that are not drafted.
            draft_hidden (`torch.Tensor`): Draft hidden states `[B, P, H]` of the positions that predict.
            anchors (`torch.Tensor`): Token ids `[B]` before the first proposals.
            embed (`Callable`): Returns the embeddings `[B, H]` of token ids.

        Returns:
            `torch.Tensor`: Corrected logits `[B, P, V]`.
        """
        tokens = anchors
        corrected = []
        parts = self.project_hidden(draft_hidden)
        state = self.initial_state(len(anchors))
        for index, logits in enumerate(base_logits.unbind(dim=1)):
            state = self.gru.step(embed(tokens).to(state), state)
            if index >= self.config.pure_draft_prefix_len:
                logits = logits + self.up(self.activate(parts[:, index], state)).to(logits)
            corrected.append(logits)
            tokens = logits.argmax(dim=-1)
        return torch.stack(corrected, dim=1)


def anchors_of(rows: torch.Tensor, count: int, num_proposals: int) -> torch.Tensor:
    """Select the anchors from a server's token ids, which can be padded; `count` is B P.

    Example:
    ```python
    >>> import torch
    >>> from hf_domino.serving.head import anchors_of
    >>> anchors_of(torch.tensor([7, 1, 1, 9, 1, 1, 0, 0]), count=4, num_proposals=2)
    tensor([7, 9])

    ```
    """
    width = 1 + num_proposals
    return rows[: count // num_proposals * width : width]
