"""Blocks whose prefix the drafter wrote itself: the GRU reads its own greedy proposals in place of the text.

Labels stay the text's tokens. In drafting, what follows a wrong proposal is never accepted, so what is learned behind
one can only steady the head; before the first wrong one, own tokens are the text's (arXiv 1506.03099 for the idea).

Shapes: B batch, N blocks per row, K block size, H hidden size, G width of the prefix state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LogitsProcessorList

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel
from hf_domino.training.objective.anchors import row_generators


def choose_own_prefixes(batch: Mapping[str, torch.Tensor], share: float, *seeds: int) -> torch.Tensor:
    """Draw in which blocks the GRU reads the drafter's own proposals, by each row's own tokens.

    Args:
        batch (`Mapping[str, torch.Tensor]`): `input_ids` and `attention_mask` `[B, S]`, `anchors` `[B, N]`.
        share (`float`): Of the blocks, in [0, 1].
        seeds (`int`): Seeds beside the row's tokens.

    Returns:
        `torch.Tensor`: `[B, N]` bool, on the batch's device.
    """
    num_blocks = batch["anchors"].shape[1]
    draws = [torch.rand(num_blocks, generator=generator) for generator in row_generators(batch, *seeds)]
    return (torch.stack(draws) < share).to(batch["anchors"].device)


@torch.no_grad()
def write_own_prefixes(
    drafter: DominoDraftModel,
    target: TargetModel,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    max_logits_per_chunk: int,
    gathers: bool = True,
) -> torch.Tensor:
    """The tokens of blocks, with the drafter's own greedy proposals behind the anchor in the chosen ones.

    Args:
        drafter (`DominoDraftModel`): The drafter.
        target (`TargetModel`): Gives embeddings and lm_head.
        hidden (`torch.Tensor`): Draft hidden states `[B, N, K, H]`.
        tokens (`torch.Tensor`): The text's tokens `[B, N, K]`, the anchor first.
        chosen (`torch.Tensor`): `[B, N]` bool.
        max_logits_per_chunk (`int`): Most base logits held at once.
        gathers (`bool`, *optional*, defaults to `True`): Whether proposals are made in the chosen blocks alone, which
            reads how many there are.

    Returns:
        `torch.Tensor`: `[B, N, K]` int64.
    """
    config = drafter.config
    blocks, anchors = hidden[..., config.label_offset :, :], tokens[..., :1]  # the positions that predict
    blocks, anchors = (part[chosen] if gathers else part.flatten(0, 1) for part in (blocks, anchors))
    size = max(1, max_logits_per_chunk // (blocks.shape[1] * config.draft_width))
    law = TokenLaw(LogitsProcessorList())
    written = [
        rollout(drafter, target, some, Prefixes.of(first), law, is_fixed=not gathers)
        for some, first in zip(blocks.split(size), anchors.split(size), strict=True)
        if len(some)
    ]
    if not written:
        return tokens
    own = torch.cat((anchors, torch.cat(written)), dim=1)[:, : config.block_size]
    return (
        tokens.masked_scatter(chosen[..., None], own)
        if gathers
        else torch.where(chosen[..., None], own.view_as(tokens), tokens)
    )
