"""Correction heads, which correct a block's base logits according to the tokens chosen so far, and their scorer.

What a correction does not take from the chosen tokens is computed once a round, for all depths together. Where they
support the head, the fused kernels of `domino_kernels` read a token and correct the logits in one step each.

Shapes: N sequences or branches, B sequences, L branches of each, T tokens, C depths, H hidden size, G width of a state,
R width of the input of W2, M candidates, D tokens that can be drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from domino_kernels import advance_branches, correct_and_choose, correct_branches
from hf_domino.methods.input_table import InputTable
from hf_domino.methods.scorer import Drafted, Scorer
from hf_domino.targets.view import TargetModel

NUM_PRECOMPUTED = 2  # input products are computed in advance, all together, for this many likely tokens of each depth


def partial_product(
    layer: nn.Module,
    values: torch.Tensor,
    first: int = 0,
    biased: bool = False,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a linear layer to one part of its input, and add the products of the other parts.

    Args:
        layer (`nn.Module`): A linear layer, or PEFT's wrapper around one, whose adapters are applied, too.
        values (`torch.Tensor`): The part of the input, `[..., P]`.
        first (`int`, *optional*, defaults to 0): Column of the layer at which the part begins.
        biased (`bool`, *optional*, defaults to `False`): Whether to add the layer's bias to this part.
        added (`torch.Tensor`, *optional*): The products of other parts, of the result's shape.
    """
    weight: Any = layer.weight
    bias: Any = layer.bias
    if type(layer) is nn.Linear:
        own = weight[:, first : first + values.shape[-1]]
        if added is not None and not biased and values.dim() == added.dim() == 2 and added.dtype == values.dtype:
            return torch.addmm(added, values, own.t())
        product = F.linear(values, own, bias if biased else None)
    else:
        product = layer(F.pad(values, (first, weight.shape[1] - first - values.shape[-1])))
        if bias is not None and not biased:
            product = product - bias
    return product if added is None else added + product


class CorrectionHead(ABC):
    """A correction head, which makes the scores of a position depend on the tokens chosen before it.

    Most heads compute corrected_k = base_k + W2 activate(part_k, state_k). The part comes from the draft hidden state
    and is computed once per block. The state summarises the tokens before the position and is zero before the anchor.
    A head that corrects in another way overrides `correct`.
    """

    state_size: int  # G
    num_passes: int | None = None  # for heads that read all tokens of a chain at once: passes over the chain
    # For heads with a GRU, whose input products can be cached by token and which the kernels support.
    gru: Any = None
    project_state: Any = None

    @property
    @abstractmethod
    def up(self) -> nn.Linear:
        """The layer of W2, `[D, R]`, or whichever layer is zero as long as the head corrects nothing."""

    def initial_state(self, num_rows: int) -> torch.Tensor:
        """The zero state `[N, G]` that every block starts from."""
        return self.up.weight.new_zeros(num_rows, self.state_size)

    @abstractmethod
    def project_hidden(self, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Compute the part of draft hidden states `[..., H]`; its width depends on the head."""

    @abstractmethod
    def step(
        self, target: TargetModel, token_ids: torch.Tensor, states: torch.Tensor, part: torch.Tensor
    ) -> torch.Tensor:
        """Read one more token per branch.

        Args:
            target (`TargetModel`): Provides the token embeddings.
            token_ids (`torch.Tensor`): The tokens to read, `[N]`.
            states (`torch.Tensor`): The states before these tokens, `[N, G]`.
            part (`torch.Tensor`): The parts of the positions after these tokens, as `project_hidden` returns them.

        Returns:
            `torch.Tensor`: The states after these tokens, `[N, G]`.
        """

    def read(self, target: TargetModel, token_ids: torch.Tensor, draft_hidden: torch.Tensor) -> torch.Tensor:
        """Read all tokens of a path from the start.

        Args:
            target (`TargetModel`): Provides the token embeddings.
            token_ids (`torch.Tensor`): The token before each position, `[N, T]`.
            draft_hidden (`torch.Tensor`): The draft hidden states of the positions, `[N, T, H]`.

        Returns:
            `torch.Tensor`: The state after each token, `[N, T, G]`.
        """
        states = [self.initial_state(len(token_ids))]
        for tokens, part in zip(token_ids.unbind(1), self.project_hidden(draft_hidden).unbind(1), strict=True):
            states.append(self.step(target, tokens, states[-1], part))
        return torch.stack(states[1:], dim=1)

    @abstractmethod
    def activate(self, part: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Compute the input of W2 `[..., R]` from the parts and the states `[..., G]` of positions."""

    def narrow(self, base_logits: torch.Tensor) -> torch.Tensor:
        """Mask the base logits `[..., D]` of tokens that the head does not consider; by default, it considers all."""
        return base_logits

    def fits_kernels(self, device: torch.device) -> bool:
        """Whether the fused kernels support this head on a device."""
        return False

    def rows(self, target: TargetModel, columns: torch.Tensor) -> torch.Tensor:
        """Select what `correct` needs for some columns `[..., M]` only: their rows of W2, `[..., M, R]`."""
        return F.embedding(columns.to(self.up.weight.device), self.up.weight)

    def correct(
        self, target: TargetModel, base_logits: torch.Tensor, activated: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Correct base logits `[..., D]` by the input of W2 `[..., R]`.

        With rows `[N, M, R]`, both are `[N, L, ...]`, or `[N, 1, M]` for base logits that L branches share.
        """
        if rows is None:
            return base_logits + self.up(activated).to(base_logits)
        if (activated.dtype, activated.device) == (base_logits.dtype, base_logits.device):
            return torch.baddbmm(base_logits, activated, rows.mT)
        return base_logits + torch.bmm(activated, rows.mT).to(base_logits)


class HeadScorer(Scorer):
    """Scores drafts by base logits and the correction of the drafter's head.

    Args:
        drafter ([`DominoDraftModel`]): The drafter, which has a head.
        target ([`TargetModel`]): Provides the embeddings and the lm_head.
        reads_host (`bool`, *optional*, defaults to `True`): Whether tokens may be read on the host, which a captured
            function may not do.
    """

    _states: torch.Tensor  # [B * L, G]

    def __init__(self, drafter: Any, target: TargetModel, reads_host: bool = True):
        super().__init__(drafter, target)
        self._head = drafter.head
        self.num_passes = self._head.num_passes
        self._table: InputTable | None = None
        # On other devices, the host would have to wait for the token ids before it could look them up.
        if reads_host and self._head.gru is not None and drafter.device.type == "cpu":
            self._table = InputTable(self._head.gru, target)

    @property
    def num_bytes(self) -> int:
        if self._table is None:
            return 0
        return self._table.num_bytes

    def begin(self, drafted: Drafted) -> None:
        super().begin(drafted)
        self.logits = self._head.narrow(self.logits)
        self._hidden = drafted.hidden
        self._anchors = drafted.anchors

    def narrow(self, logits: torch.Tensor, columns: torch.Tensor | None = None, is_fused: bool = False) -> None:
        """Take the logits and what belongs to the candidates, and read the anchors."""
        super().narrow(logits, columns)
        head = self._head
        self._is_fused = is_fused
        self._columns = columns
        self._parts = head.project_hidden(self._hidden).unbind(1)  # [B, ...] of each depth
        # What belongs to the candidates of each depth: the rows of W2 [B, M, R], and base logits [B, 1, M].
        self._rows: tuple[torch.Tensor, ...] | None = None
        if columns is not None and not is_fused:
            self._rows = head.rows(self.target, columns).unbind(1)
            self._bases = logits[:, :, None].unbind(1)
        if columns is not None and self._table is not None:
            likeliest = self.vocabulary.ids(columns[:, :-1, :NUM_PRECOMPUTED])
            self._table.add([*self._anchors.flatten().tolist(), *likeliest.flatten().tolist()])
        self._num_read = 0  # tokens of each branch that the states have read, beginning with the anchor
        self._read(self._anchors, head.initial_state(len(self._hidden)))

    def scores(self, depth: int) -> torch.Tensor:
        head = self._head
        if depth < self.drafter.config.pure_draft_prefix_len:
            return super().scores(depth)
        logits = self._by_depth[depth]
        if self._is_fused and self._columns is not None:
            by_branch = head.project_state(self._states).unflatten(0, (-1, self.num_branches))
            columns = self._columns[:, depth]
            return correct_branches(logits, self._parts[depth], by_branch, head.up.weight, columns).flatten(0, 1)
        activated = head.activate(self.of_branches(self._parts[depth]), self._states)  # [B * L, R]
        if self._rows is None:
            return head.correct(self.target, self.of_branches(logits), activated)
        activated = activated.view(-1, self.num_branches, activated.shape[1])
        return head.correct(self.target, self._bases[depth], activated, self._rows[depth]).flatten(0, 1)

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        """Let the head read the new tokens of the branches."""
        if self._is_fused and parents is not None:
            states = self._states.unflatten(0, (len(parents), -1))
            gru = self._head.gru
            products = gru.project_inputs(self.target.embed(tokens).to(states))  # [B, L', 3G]
            states = advance_branches(products, states, parents.to(states.device), gru.weight_hh_l0)
            self._states = states.flatten(0, 1)
            super().advance(tokens, parents)
            return
        super().advance(tokens, parents)
        self._read(tokens, self.extended(self._states, parents))

    def refine(self, tokens: torch.Tensor) -> torch.Tensor:
        before = torch.cat((self._anchors, tokens[:, :-1]), dim=1)
        states = self._head.read(self.target, before, self._hidden)
        parts = torch.stack(self._parts, dim=1)
        activated = self._head.activate(parts, states).flatten(0, 1)[:, None]  # [B * C, 1, R]
        base = self.logits.flatten(0, 1)[:, None]
        rows = None if self._rows is None else torch.stack(self._rows, dim=1).flatten(0, 1)
        return self._head.correct(self.target, base, activated, rows).view_as(self.logits)

    def choose(self, depth: int, noise: torch.Tensor | None, temperature: float) -> torch.Tensor:
        head = self._head
        return correct_and_choose(
            self._by_depth[depth],
            self._parts[depth] + head.project_state(self._states),
            head.up.weight,
            None if self._columns is None else self._columns[:, depth],
            noise=noise,
            temperature=None if noise is None else temperature,
        )

    def _read(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """Advance the states `[B * L, G]` of branches by the last token of each, `[B, L]`."""
        if self._table is not None:
            products = self._table.rows([token for row in tokens.tolist() for token in row])
            self._states = self._head.gru.advance(products, states)
        else:
            part = self.of_branches(self._parts[self._num_read])
            self._states = self._head.step(self.target, tokens.flatten(), states, part)
        self._num_read += 1
