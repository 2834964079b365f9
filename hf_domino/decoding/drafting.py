"""One generation's drafting: context features in, draft proposals out. Both generation loops use it.

Shapes: B batch, C new context positions, T tokens so far, K block size, P proposals, H hidden size.
"""

from __future__ import annotations

import torch

from hf_domino.context import ContextCache
from hf_domino.decoding.rollout import DraftProposal, rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.modeling import DominoDraftModel
from hf_domino.stats import PhaseTimer
from hf_domino.target import TargetModel


class DraftSession:
    """Drafts the rounds of one generation, keeping the context features' keys and values between them.

    Args:
        drafter ([`DominoDraftModel`]): The drafter; not changed.
        target ([`TargetModel`]): View of the target.
        law ([`TokenLaw`]): What drafts are chosen from.
        timer ([`PhaseTimer`], *optional*): Times the backbone as `draft` and the rest as `rollout`.
    """

    def __init__(self, drafter: DominoDraftModel, target: TargetModel, law: TokenLaw, timer: PhaseTimer | None = None):
        self.drafter, self.target, self.law = drafter, target, law
        self.timer = timer or PhaseTimer(enabled=False)
        self._cache = ContextCache(len(drafter.layers))
        self._new_context: torch.Tensor | None = None  # [B, C, H], not yet in the cache
        self._positions = torch.empty(0)  # [B, C] of the new context; of the last one, once it is in the cache

    def observe(self, captured: tuple[torch.Tensor, ...], position_ids: torch.Tensor) -> None:
        """Take the target's hidden states of newly committed positions, the one before the next anchor last.

        Args:
            captured (`tuple[torch.Tensor]`): L hidden states `[B, C, H]`.
            position_ids (`torch.Tensor`): Their absolute positions `[B, C]`.
        """
        device = self.drafter.device
        features = self.drafter.fuse_context([states.to(device) for states in captured])
        position_ids = position_ids.to(device)
        if self._new_context is not None:
            features = torch.cat((self._new_context, features), dim=1)
            position_ids = torch.cat((self._positions, position_ids), dim=1)
        self._new_context, self._positions = features, position_ids

    def observe_block(self, captured: tuple[torch.Tensor, ...], num_committed: int) -> None:
        """Take the hidden states of a verified block's committed positions, the anchor first.

        Args:
            captured (`tuple[torch.Tensor]`): L hidden states `[B, P + 1, H]` of anchor and proposals.
            num_committed (`int`): How many tokens the round committed; the last is the next anchor, not yet seen.
        """
        positions = self._positions[:, -1:] + torch.arange(1, num_committed + 1, device=self._positions.device)
        self.observe(tuple(states[:, :num_committed] for states in captured), positions)

    def propose(self, prefix_ids: torch.Tensor, num_draft_tokens: int | None = None) -> DraftProposal:
        """Draft the tokens after `prefix_ids`; all context before the anchor must have been observed.

        Args:
            prefix_ids (`torch.Tensor`): Tokens so far, the anchor last, `[B, T]`.
            num_draft_tokens (`int`, *optional*): At most this many proposals; defaults to all the drafter makes.

        Returns:
            [`DraftProposal`]: On the device of `prefix_ids`.
        """
        config = self.drafter.config
        count = config.num_draft_tokens if num_draft_tokens is None else min(num_draft_tokens, config.num_draft_tokens)
        if count <= 0:
            return DraftProposal(prefix_ids[:, :0], None)
        with self.timer.phase("draft"):
            draft_hidden = self._run_backbone(prefix_ids[:, -1:])
        with self.timer.phase("rollout"):
            first = config.label_offset
            return rollout(self.drafter, self.target, draft_hidden[:, first : first + count], prefix_ids, self.law)

    def _run_backbone(self, anchor: torch.Tensor) -> torch.Tensor:
        """Draft hidden states `[B, K, H]` of the block that starts with the anchor `[B, 1]`."""
        config, device = self.drafter.config, self.drafter.device
        masks = anchor.new_full((anchor.shape[0], config.block_size - 1), config.mask_token_id)
        noise_embeds = self.target.embed(torch.cat((anchor, masks), dim=1)).to(device)
        assert self._positions.numel(), "observe the context before proposing"
        positions = self._positions[:, -1:] + torch.arange(1, config.block_size + 1, device=device)
        seen = None if self._new_context is None else self._positions
        draft_hidden = self.drafter(noise_embeds, positions, self._new_context, seen, cache=self._cache)
        self._new_context = None
        return draft_hidden
