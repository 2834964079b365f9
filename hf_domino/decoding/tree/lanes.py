"""Where the nodes of a depth come from: the scores of their children, and lanes that go on behind some of them.

Shapes: B rows, L lanes of each, M candidates of a depth, C depths, G width of the prefix state, R low rank, H hidden
size.
"""

from __future__ import annotations

import torch

from domino_kernels import advance_lanes, correct_lanes, reference
from hf_domino.decoding.correcting.candidates import CandidatePool
from hf_domino.decoding.correcting.corrections import FORESEEN, read_tokens
from hf_domino.decoding.correcting.input_table import InputTable
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel


class DominoLanes:
    """Scores of lanes by the backbone's base logits and the correction head, if there is one.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): Gives embeddings.
        draft_hidden (`torch.Tensor`): Draft hidden states of the positions that predict, `[B, C, H]`.
        prefixes ([`Prefixes`]): The tokens so far of the B rows, the anchor last.
        pool ([`CandidatePool`]): Candidates of each depth.
        table ([`InputTable`], *optional*): Input products to use and to add to.
        is_fused (`bool`, *optional*, defaults to `False`): Whether kernels advance and correct lanes.
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        target: TargetModel,
        draft_hidden: torch.Tensor,
        prefixes: Prefixes,
        pool: CandidatePool,
        table: InputTable | None = None,
        is_fused: bool = False,
    ):
        self._pool, self._target, self._table, self._is_fused = pool, target, table, is_fused
        self._texts = prefixes.last()[:, :0, None].mT  # [B, 1, 0], with each depth a token more
        self._has_head = drafter.has_correction_head
        if self._has_head:
            self._gru, self._projection = drafter.prefix_gru, drafter.embed_proj
            self._first_corrected = drafter.config.pure_draft_prefix_len
            if table is not None:
                likeliest = pool.token_ids[:, :-1, :FORESEEN]
                table.add([*prefixes.last().flatten().tolist(), *likeliest.flatten().tolist()])
            self._block_part = self._projection.project_hidden(draft_hidden)  # [B, C, R]
            self._states = self._read(prefixes.last(), self._gru.initial_state(len(draft_hidden))[:, None])  # [B, L, G]

    @property
    def num_depths(self) -> int:
        """How deep it can go (C)."""
        return self._pool.token_ids.shape[1]

    def scores(self, depth: int) -> torch.Tensor:
        """The draft law's scores `[B, L, M]` of the candidates behind each lane."""
        logits = self._pool.logits[:, depth, None]
        if self._has_head and depth >= self._first_corrected:
            correct = correct_lanes if self._is_fused else reference.correct_lanes
            state_part, up_weight = self._projection.project_state(self._states), self._projection.up_weight
            columns = self._pool.columns[:, depth].to(up_weight.device)
            logits = correct(self._pool.logits[:, depth], self._block_part[:, depth], state_part, up_weight, columns)
        logits = logits.expand(-1, self._texts.shape[1], -1)
        return self._pool.scores(logits.flatten(0, 1), self._texts.flatten(0, 1)).view(logits.shape)

    def advance(self, lanes: torch.Tensor, tokens: torch.Tensor) -> None:
        """Go on with lanes behind these `[B, L']`, each by a token `[B, L']`."""
        before = self._texts.gather(1, lanes[..., None].expand(-1, -1, self._texts.shape[2]))
        self._texts = torch.cat((before, tokens[..., None]), dim=2)
        if not self._has_head:
            return
        lanes = lanes.to(self._states.device)
        if self._is_fused:
            products = self._gru.project_inputs(self._target.embed(tokens).to(self._states))  # [B, L', 3G]
            self._states = advance_lanes(products, self._states, lanes, self._gru.weight_hh_l0)
        else:
            states = self._states.gather(1, lanes[..., None].expand(-1, -1, self._states.shape[2]))
            self._states = self._read(tokens, states)

    def _read(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        flat = read_tokens(self._gru, self._target, tokens.flatten(), states.flatten(0, 1), self._table)
        return flat.view(*states.shape)
