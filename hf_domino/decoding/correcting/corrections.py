"""The correction head along one block: which tokens it has read, and what it adds to the base logits.

corrected_k = base_k + W2 activate(part_k, state_k), one step of the head per token; heads are in `hf_domino.kinds`.

Shapes: B batch, P proposals, H hidden size, G width of a state, M candidates, D tokens that are drafted, all of the
target's or fewer.
"""

from __future__ import annotations

import torch

from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.head import CorrectionHead
from hf_domino.target.view import TargetModel

FORESEEN = 2  # likeliest tokens of every position whose input products are computed together


class Corrections:
    """Corrections of successive positions.

    Args:
        drafter ([`DominoDraftModel`]): Gives the correction head.
        target ([`TargetModel`]): Gives embeddings.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, P, H]`.
        anchors (`torch.Tensor`): The tokens before the first proposal, `[B]`.
        candidates (`torch.Tensor`, *optional*): Columns of the candidates of each position, likeliest first,
            `[B, P, M]`, if tokens will be chosen among them.
        table ([`InputTable`], *optional*): Input products to use and to add to; None to compute them as they come.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        draft_hidden: torch.Tensor,
        anchors: torch.Tensor,
        candidates: torch.Tensor | None = None,
        table: InputTable | None = None,
    ):
        head = drafter.head
        assert head is not None
        self._target, self._head, self._table = target, head, table
        self._first_corrected = drafter.config.pure_draft_prefix_len
        self._parts = head.project_hidden(draft_hidden)  # [B, P, ...], once
        self._rows = None if candidates is None else head.rows(candidates)  # [B, P, M, R]
        if table is not None and candidates is not None:
            likeliest = drafter.vocabulary.ids(candidates[:, :-1, :FORESEEN])
            table.add([*anchors.tolist(), *likeliest.flatten().tolist()])
        # [B, G] each; the one of proposal i has read the anchor and the i proposals before.
        self._states: list[torch.Tensor] = []
        self.read(anchors)

    def read(self, token_ids: torch.Tensor) -> None:
        """Advance the state by the anchor or the next proposal, ids `[B]`; not by the last, behind which is none."""
        index = len(self._states)
        state = self._states[-1] if index else self._head.initial_state(len(token_ids))
        self._states.append(read_tokens(self._head, self._target, token_ids, state, self._parts[:, index], self._table))

    def forget(self, num_proposals: int) -> None:
        """Go back to where only the first `num_proposals` had been read."""
        del self._states[num_proposals + 1 :]

    def apply(self, index: int, base_logits: torch.Tensor) -> torch.Tensor:
        """Corrected logits of proposal `index`; base logits before the first corrected one.

        Args:
            index (`int`): Which proposal; those before must have been read.
            base_logits (`torch.Tensor`): Its base logits, `[B, D]`, or `[B, M]` where there are candidates.
        """
        if index < self._first_corrected:
            return base_logits
        activated = self._head.activate(self._parts[:, index], self._states[index])
        rows = None if self._rows is None else self._rows[:, index]
        return base_logits + self._head.expand(activated, rows).to(base_logits)

    def apply_to_all(self, base_logits: torch.Tensor) -> torch.Tensor:
        """Corrected logits of all columns of the first N proposals; those before each must have been read.

        Args:
            base_logits (`torch.Tensor`): `[B, N, D]`.
        """
        first, count = self._first_corrected, base_logits.shape[1]
        if count <= first:
            return base_logits
        states = torch.stack(self._states[first:count], dim=1)  # [B, N - first, G]
        activated = self._head.activate(self._parts[:, first:count], states)
        corrected = base_logits[:, first:] + self._head.expand(activated).to(base_logits)
        return torch.cat((base_logits[:, :first], corrected), dim=1) if first else corrected


def read_tokens(
    head: CorrectionHead,
    target: TargetModel,
    token_ids: torch.Tensor,
    states: torch.Tensor,
    part: torch.Tensor,
    table: InputTable | None = None,
) -> torch.Tensor:
    """Advance states `[N, G]` by a token each, ids `[N]`, before positions of these parts."""
    if table is not None:
        return head.gru.advance(table.rows(token_ids.tolist()), states)
    return head.step(target, token_ids, states, part)
