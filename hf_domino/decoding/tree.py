"""The proposals of a round: a tree below the anchor. In a chain, each node is the parent of the next one.

The token that the target chooses at a position only depends on the text before it and on the noise of its step. So at
most one child of a node is right, and the right nodes form one path that starts at the anchor. That path is what plain
`generate` would generate.

The verification forward covers W = N + 1 positions: the anchor is at position 0, and node n is at position n + 1. The
position id of each node follows from its depth, and a node only sees its own path. The masks that Transformers creates
for a chain already account for padding, windows and chunks, and for the number of columns that each type of layer has.
In a tree, a node at depth d therefore uses row d of the chain's mask, restricted to the node's own path.

Shapes: B sequences, N nodes, W positions, C longest path, T tokens so far, S columns of a layer's mask (including the
columns of the block), V vocabulary.
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
    """The proposals of a round.

    Args:
        tokens (`torch.Tensor`): The tokens of the nodes, `[B, N]`. A node comes after its parent, and siblings have
            different tokens.
        parents (`torch.Tensor`, *optional*): The position of each node's parent, `[B, N]`, from 0 to n for node n.
            Defaults to None for a chain, in which the parent of node n is at position n.
        longest (`int`, *optional*): The largest possible number of nodes on a path (C). Defaults to N.
        chances (`torch.Tensor`, *optional*): The drafter's estimate `[B, N]` of the chance that a node is accepted
            together with all nodes before it on its path.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    longest: int | None = None
    chances: torch.Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes (N)."""
        return self.tokens.shape[1]

    @property
    def depth(self) -> int:
        """The largest number of tokens that can be accepted (C)."""
        if self.longest is None:
            return self.num_nodes
        return min(self.longest, self.num_nodes)

    @cached_property
    def _jumps(self) -> torch.Tensor:
        """The position of each position's ancestor k + 1 generations up, `[B, W, C]`; 0 beyond the anchor."""
        assert self.parents is not None
        parents = torch.nn.functional.pad(self.parents, (1, 0))  # the anchor is its own parent
        jumps = [parents]
        for _ in range(self.depth - 1):
            jumps.append(parents.gather(1, jumps[-1]))
        return torch.stack(jumps, dim=2)

    @cached_property
    def depths(self) -> torch.Tensor:
        """The depth of each position, `[B, W]`: 0 for the anchor, 1 for its children."""
        positions = torch.arange(self.num_nodes + 1, device=self.tokens.device)
        if self.parents is None:
            return positions.expand(len(self.tokens), -1)
        return (self._jumps > 0).sum(dim=2) + (positions > 0)

    @cached_property
    def sees(self) -> torch.Tensor:
        """Which positions each position sees, `[B, W, W]`: itself and those before it on its path. Only for trees."""
        own = torch.eye(self.num_nodes + 1, dtype=torch.bool, device=self.tokens.device).repeat(len(self.tokens), 1, 1)
        return own.scatter(2, self._jumps, True)  # a missing ancestor counts as the anchor, which all positions see

    def seen_by(self, prefixes: Prefixes) -> Prefixes:
        """The text that each position sees: `B * W` texts, beginning with those of the first sequence."""
        if self.parents is None:
            return prefixes.along(self.tokens, self.num_nodes + 1)
        num_rows, width = self.depths.shape
        positions = torch.arange(width, device=self.tokens.device).expand(num_rows, -1)
        ancestors = torch.cat((positions[..., None], self._jumps), dim=2)  # [B, W, C + 1], itself first
        generations = self.depths[..., None] - torch.arange(1, self.depth + 1, device=positions.device)
        # The ancestor at each depth, repeating the position itself below its own depth.
        places = ancestors.gather(2, generations.clamp_min(0)).flatten(1)
        tokens = torch.nn.functional.pad(self.tokens, (1, 0)).gather(1, places)
        seen = prefixes.branches(width).along(tokens.view(num_rows * width, self.depth), 1)
        return seen.of_lengths(seen.ends - self.depth + self.depths.view(-1, 1))

    def sample(self, scores: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token at each position; see [`~hf_domino.decoding.sampling.sample`].

        Args:
            scores (`torch.Tensor`): Processed scores `[B, W, V]`.
            noise (`torch.Tensor`): The noise of the decode steps from the anchor's position on, `[B, C + 1, V]` or for
                more steps.

        Returns:
            `tuple`: The values and the tokens, `[B, W]` each.
        """
        if self.parents is None:
            noise = noise[:, : scores.shape[1]]
        else:
            noise = noise[torch.arange(len(scores), device=scores.device)[:, None], self.depths]
        return sample(scores, noise)

    def branches(self) -> dict[tuple[int, int], int]:
        """The position of each node in the first sequence's tree, by the position of its parent and its own token."""
        tokens = self.tokens[0].tolist()
        parents = list(range(len(tokens)))
        if self.parents is not None:
            parents = self.parents[0].tolist()
        return {key: place for place, key in enumerate(zip(parents, tokens, strict=True), start=1)}

    def accepted(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Find the path from the anchor whose nodes all equal the target's own tokens.

        Args:
            chosen (`torch.Tensor`): The target's own next token at each position, `[B, W]`.

        Returns:
            `tuple`: The number of accepted nodes, `[B, 1]`, and the accepted path, `[B, C + 1]`: the anchor's position
            followed by the positions of the accepted nodes. The path is None for a chain, which accepts its first
            nodes.
        """
        if self.parents is None:
            right = self.tokens == chosen[:, :-1]
            return right.long().cumprod(dim=1).sum(dim=1, keepdim=True), None
        right = torch.nn.functional.pad(self.tokens == chosen.gather(1, self.parents), (1, 0), value=True)
        is_accepted = ~(self.sees & ~right[:, None]).any(dim=2)  # whether all nodes on a position's path are right
        path = self.depths.new_zeros(len(is_accepted), self.depth + 2)
        positions = torch.arange(is_accepted.shape[1], device=is_accepted.device).expand_as(is_accepted)
        path = path.scatter(1, torch.where(is_accepted, self.depths, self.depth + 1), positions)
        return (path[:, 1:-1] > 0).sum(dim=1, keepdim=True), path[:, :-1]


def tree_inputs(
    depths: torch.Tensor,
    sees: torch.Tensor,
    inputs: dict[str, Any],
    target: PreTrainedModel,
    start: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Turn the target's inputs for a chain of the tree's tokens into inputs for the tree.

    Args:
        depths (`torch.Tensor`): The `depths` of a [`Tree`], `[B, W]`.
        sees (`torch.Tensor`): The `sees` of a [`Tree`], `[B, W, W]`.
        inputs (`dict`): The output of `prepare_inputs_for_generation` for the W positions, with a mask `[B, ...]`.
        target (`PreTrainedModel`): The target, with eager or sdpa attention.
        start (`torch.Tensor`, *optional*): The column that the block begins at, `[B, 1]`. By default, the block has the
            last W columns.

    Returns:
        `dict`: The inputs with new position ids, and with a mask `[B, 1, W, S]` or one such mask for each type of
        layer.
    """
    masks = inputs.get("attention_mask")
    if not isinstance(masks, dict) and (masks is None or masks.dim() == 2):  # fixed caches already have their masks
        create = getattr(target, "create_masks_for_generate", create_masks_for_generate)  # some targets have their own
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
    """Turn the mask `[B, 1, W, S]` of a chain into that of a tree. A boolean mask stays boolean."""
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
