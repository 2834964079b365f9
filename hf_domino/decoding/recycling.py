"""One generation's drafting by token recycling: a table of successors, which the target fills on the way.

Shapes: B batch, L lanes, M successors, N proposals, C depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.lanes import Lanes
from hf_domino.decoding.noise import DraftNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.tree import Tree
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds.recycling import learn


class RecyclingSession(DraftSession):
    """Drafts the successors of successors, and learns from all that is verified; it keeps nothing of a text."""

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: it reads no hidden states, and prefixes tell rows apart."""

    observe_block = select = context = observe

    def _draft(self, anchors: torch.Tensor, endings: Callable[[int], torch.Tensor] | None = None) -> torch.Tensor:
        """One for each token of a path, `[B, P]`; nothing is read of them but how many there are."""
        return anchors.expand(-1, self.drafter.config.num_draft_tokens)

    def learn(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> None:
        """Take what the target made of all positions, rejected ones too."""
        with self.timer.phase("draft"):
            tokens = torch.cat((prefixes.last(), proposals.tokens), dim=1)
            learn(self.drafter, tokens.flatten(), logits.flatten(0, 1))

    def _lanes(
        self, draft_hidden: torch.Tensor, prefixes: Prefixes, noise: DraftNoise | None, most: int, is_tree: bool
    ) -> Lanes:
        return SuccessorLanes(self.drafter, prefixes, noise, self.law.temperature, most)


class SuccessorLanes(Lanes):
    """Lanes whose candidates are the likeliest successors of their last tokens, as the target gave them last.

    Args:
        drafter ([`DominoDraftModel`]): Has the table.
        prefixes ([`Prefixes`]): Tokens so far of the B rows.
        noise (`torch.Tensor`, *optional*): What tokens are drawn with, `[B, C, V]` or of more positions.
        temperature (`float`): Which they are drawn at.
        num_depths (`int`): How deep to go (C).
    """

    def __init__(
        self,
        drafter: DominoDraftModel,
        prefixes: Prefixes,
        noise: DraftNoise | None,
        temperature: float,
        num_depths: int,
    ):
        super().__init__(prefixes, num_depths, None)
        self._drafter, self._temperature = drafter, temperature
        self._tokens, self._noise = prefixes.last(), noise if isinstance(noise, torch.Tensor) else None

    def advance(self, tokens: torch.Tensor, lanes: torch.Tensor | None = None) -> None:
        """See [`Lanes`]; the last tokens are all that counts."""
        self._tokens = tokens

    def candidates(self, depth: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """See [`Lanes`]. Of logits processors, these scores follow the temperature alone."""
        token_ids, noise = self._drafter.successors[self._tokens], None
        if self._noise is not None:
            noise = self._noise[:, depth].gather(1, token_ids.flatten(1)).view(token_ids.shape)
        return self._drafter.scores[self._tokens] / self._temperature, noise, token_ids
