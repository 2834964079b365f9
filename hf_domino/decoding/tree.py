"""The form of proposals: a tree behind the anchor. A chain is the tree whose parents are the nodes before.

A position's token is a function of the text before it and of its step's noise, whatever the branch. So of the children
of a node at most one is right, and the right nodes are one path from the anchor on: what plain `generate` writes.

The verification forward goes over W = N + 1 positions: 0 is the anchor, and node n stands at n + 1. Each stands at its
depth and sees its own path. Masks for a chain know padding, windows and chunks, and how many columns each kind of layer
returns. In a tree a position sees of them what the chain's position of its depth sees, as far as that stands on its
path.

Shapes: B rows, N nodes, W positions, C longest path, T tokens so far, S columns that a kind of layer returns, those of
the block among them, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import sample


@dataclass(frozen=True)
class Tree:
    """Proposals of a round.

    Args:
        tokens (`torch.Tensor`): `[B, N]`, a node behind its parent; siblings differ.
        parents (`torch.Tensor`, *optional*): The position of each node's parent, `[B, N]` in `[0, n]`; None for a
            chain, in which the parent of node n stands at n.
        longest (`int`, *optional*): Nodes of the longest path that there can be (C); defaults to N.
        chances (`torch.Tensor`, *optional*): That each is accepted with all before it, `[B, N]`, as the drafter has it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    longest: int | None = None
    chances: torch.Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes (N)."""
        return self.tokens.shape[1]

    @property
    def depth(self) -> int:
        """Most tokens that can be accepted (C)."""
        if self.longest is None:
            return self.num_nodes
        return min(self.longest, self.num_nodes)

    @cached_property
    def _jumps(self) -> torch.Tensor:
        """Each position's ancestor k + 1 generations up, `[B, W, C]`; 0 behind the anchor."""
        assert self.parents is not None
        parents = torch.nn.functional.pad(self.parents, (1, 0))  # the anchor is its own
        jumps = [parents]
        for _ in range(self.depth - 1):
            jumps.append(parents.gather(1, jumps[-1]))
        return torch.stack(jumps, dim=2)

    @cached_property
    def depths(self) -> torch.Tensor:
        """Tokens behind the anchor at each position, itself included, `[B, W]`."""
        positions = torch.arange(self.num_nodes + 1, device=self.tokens.device)
        if self.parents is None:
            return positions.expand(len(self.tokens), -1)
        return (self._jumps > 0).sum(dim=2) + (positions > 0)

    @cached_property
    def sees(self) -> torch.Tensor:
        """Which positions each one of a tree's block sees, itself and those before it on its path: `[B, W, W]`."""
        own = torch.eye(self.num_nodes + 1, dtype=torch.bool, device=self.tokens.device).repeat(len(self.tokens), 1, 1)
        return own.scatter(2, self._jumps, True)  # where there is no ancestor, it is the anchor, which all see

    def seen_by(self, prefixes: Prefixes) -> Prefixes:
        """The text that each position sees: `B * W` texts, those of the first row first."""
        if self.parents is None:
            return prefixes.along(self.tokens, self.num_nodes + 1)
        num_rows, width = self.depths.shape
        positions = torch.arange(width, device=self.tokens.device).expand(num_rows, -1)
        ancestors = torch.cat((positions[..., None], self._jumps), dim=2)  # [B, W, C + 1], itself first
        generations = self.depths[..., None] - torch.arange(1, self.depth + 1, device=positions.device)
        places = ancestors.gather(2, generations.clamp_min(0)).flatten(1)  # of each depth's, or itself again
        tokens = torch.nn.functional.pad(self.tokens, (1, 0)).gather(1, places)
        seen = prefixes.branches(width).along(tokens.view(num_rows * width, self.depth), 1)
        return seen.of_lengths(seen.ends - self.depth + self.depths.view(-1, 1))

    def sample(self, scores: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The token that each position draws, see [`~hf_domino.decoding.sampling.sample`].

        Args:
            scores (`torch.Tensor`): `[B, W, V]`.
            noise (`torch.Tensor`): Of the steps from the anchor's on, `[B, C + 1, V]` or of more.

        Returns:
            `tuple`: Values and tokens, `[B, W]` each.
        """
        if self.parents is None:
            noise = noise[:, : scores.shape[1]]
        else:
            noise = noise[torch.arange(len(scores), device=scores.device)[:, None], self.depths]
        return sample(scores, noise)

    def branches(self) -> dict[tuple[int, int], int]:
        """The position of each node of the first row, by its parent's position and by its token."""
        tokens = self.tokens[0].tolist()
        parents = list(range(len(tokens)))
        if self.parents is not None:
            parents = self.parents[0].tolist()
        return {key: place for place, key in enumerate(zip(parents, tokens, strict=True), start=1)}

    def accepted(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which nodes are what was chosen behind them.

        Args:
            chosen (`torch.Tensor`): The target's own token at each position, `[B, W]`.

        Returns:
            `tuple`: How many nodes are accepted, `[B, 1]`, and their positions behind the anchor's, `[B, C + 1]`; None
            for a chain, whose are the first ones.
        """
        if self.parents is None:
            right = self.tokens == chosen[:, :-1]
            return right.long().cumprod(dim=1).sum(dim=1, keepdim=True), None
        right = torch.nn.functional.pad(self.tokens == chosen.gather(1, self.parents), (1, 0), value=True)
        lives = ~(self.sees & ~right[:, None]).any(dim=2)  # all on its path are right
        path = self.depths.new_zeros(len(lives), self.depth + 2)
        positions = torch.arange(lives.shape[1], device=lives.device).expand_as(lives)
        path = path.scatter(1, torch.where(lives, self.depths, self.depth + 1), positions)
        return (path[:, 1:-1] > 0).sum(dim=1, keepdim=True), path[:, :-1]


def along(path: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Of values `[B, W, ...]` of all positions, those on a path `[B, C]`; without one all."""
    if path is None:
        return values
    index = path.to(values.device).view(*path.shape, *[1] * (values.dim() - 2))
    return values.gather(1, index.expand(-1, -1, *values.shape[2:]))


def tree_inputs(
    depths: torch.Tensor,
    sees: torch.Tensor,
    inputs: dict[str, Any],
    target: PreTrainedModel,
    start: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The target's inputs for a chain of a tree's tokens, rearranged for the tree.

    Args:
        depths (`torch.Tensor`): Those of [`Tree`], `[B, W]`.
        sees (`torch.Tensor`): Likewise, `[B, W, W]`.
        inputs (`dict`): What `prepare_inputs_for_generation` gives for the W positions, its mask `[B, ...]`.
        target (`PreTrainedModel`): Of eager or sdpa attention.
        start (`torch.Tensor`, *optional*): The column that the block begins at, `[B, 1]`; defaults to the last W ones.

    Returns:
        `dict`: Likewise; the mask is `[B, 1, W, S]`, or one such for each kind of layer.
    """
    masks = inputs.get("attention_mask")
    if not isinstance(masks, dict) and (masks is None or masks.dim() == 2):  # fixed caches have their masks already
        create = getattr(target, "create_masks_for_generate", create_masks_for_generate)  # some have their own
        masks = create(
            config=target.config,
            inputs_embeds=torch.empty(*depths.shape, 0, dtype=target.dtype, device=depths.device),
            attention_mask=masks,
            **{CACHE: inputs[CACHE]},
            position_ids=inputs["position_ids"],
        )
    if isinstance(masks, dict):
        masks = {kind: _mask(depths, sees, mask, start) for kind, mask in masks.items()}
    else:
        masks = _mask(depths, sees, masks, start)
    return inputs | {"attention_mask": masks, "position_ids": inputs["position_ids"][..., :1] + depths}


def _mask(depths: torch.Tensor, sees: torch.Tensor, mask: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """The mask `[B, 1, W, S]` of a tree, added or boolean as that of the chain is."""
    width, size = mask.shape[2:]
    rows = mask.gather(2, depths[:, None, :, None].expand(-1, -1, -1, size))
    first = size - width if start is None else start
    block = rows.gather(3, (first + depths)[:, None, None].expand(-1, -1, width, -1))
    if mask.dtype == torch.bool:
        hidden = 0.0
    else:
        hidden = torch.finfo(mask.dtype).min
    columns = (first + torch.arange(width, device=mask.device)).view(-1, 1, 1, width)
    return rows.scatter(3, columns.expand_as(block), block.masked_fill(~sees[:, None], hidden))
