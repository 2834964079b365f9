"""The correction head along the blocks of a batch, where a server takes the likeliest tokens of logits itself.

vLLM asks for logits of all proposals at once. So the tokens that the head reads are chosen here, and the logits that
are returned have them as their argmax: the server's own choice is Domino's.

Shapes: B requests, P proposals, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_domino.methods.domino import DominoHead, DominoMethodConfig


class BlockHead(nn.Module, DominoHead):
    """Hold a correction head, under the names of the releases' tensors."""

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
        """Correct whole blocks, so that the argmax of each row is the proposal behind those before it."""
        # base_logits [B, P, V], minus infinity for tokens that are not drafted; draft_hidden [B, P, H] of the positions
        # that predict; anchors [B], before the first proposal; embed gives [B, H].
        tokens, corrected = anchors, list[torch.Tensor]()
        parts, state = self.project_hidden(draft_hidden), self.initial_state(len(anchors))
        for index, logits in enumerate(base_logits.unbind(dim=1)):
            state = self.gru.step(embed(tokens).to(state), state)
            if index >= self.config.pure_draft_prefix_len:
                logits = logits + self.expand(self.activate(parts[:, index], state)).to(logits)
            corrected.append(logits)
            tokens = logits.argmax(dim=-1)
        return torch.stack(corrected, dim=1)


def anchors_of(rows: torch.Tensor, count: int, num_proposals: int) -> torch.Tensor:
    """Take the anchors of a server's rows, which may be padded; `count` is B P.

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
