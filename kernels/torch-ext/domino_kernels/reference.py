"""Plain PyTorch references of the kernels, with the same names and signatures, and the same rounding where possible.

Domino (arXiv 2605.29707): corrected = base + W2 SiLU(W1 [z ; state]), where state is the state of a GRU that has read
the tokens chosen so far.

Shapes: B rows, L branches per row, S branches per row at the previous depth, V vocabulary, M candidates, R low rank, H
width of embeddings, G width of the state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_NOISE = torch.finfo(torch.float32).tiny  # replaces noise of 0, which would turn a forbidden score into NaN


def correct_and_choose(
    base_logits: torch.Tensor,
    low_rank: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor | None = None,
    *,
    noise: torch.Tensor | None = None,
    temperature: float | None = None,
) -> torch.Tensor:
    """Reference of [`domino_kernels.correct_and_choose`]."""
    activated = F.silu(low_rank)
    if candidate_ids is None:
        correction = F.linear(activated, up_weight)  # [B, V]
    else:
        rows = F.embedding(candidate_ids, up_weight)  # [B, M, R]
        correction = (rows @ activated[..., None])[..., 0]
    scores = (base_logits + correction).to(base_logits.dtype)
    if noise is not None:
        scores = add_noise(scores, noise if candidate_ids is None else noise.gather(1, candidate_ids), temperature)
    choice = scores.argmax(dim=-1)
    return choice if candidate_ids is None else candidate_ids.gather(1, choice[:, None])[:, 0]


def add_noise(scores: torch.Tensor, noise: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
    """Add Gumbel noise, so that the argmax of the result is a draw from softmax(scores / temperature).

    Args:
        scores (`torch.Tensor`): `[..., N]`.
        noise (`torch.Tensor`): Standard exponential noise of the same shape; its negative logarithm is Gumbel noise.
        temperature (`float`, *optional*, defaults to 1): Temperature to sample at.

    Returns:
        `torch.Tensor`: scores / temperature - log(noise), fp32 `[..., N]`.
    """
    return scores.float() / (temperature or 1.0) - noise.clamp(min=MIN_NOISE).log()


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    embedding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of [`domino_kernels.gru_step`]."""
    embeds = inputs if embedding is None else F.embedding(inputs, embedding)
    return torch.gru_cell(embeds, state, weight_ih, weight_hh)


def advance_branches(
    products: torch.Tensor, state: torch.Tensor, owners: torch.Tensor, weight_hh: torch.Tensor
) -> torch.Tensor:
    """Reference of [`domino_kernels.advance_branches`]."""
    before = state.gather(1, owners[..., None].expand(-1, -1, state.shape[2]))
    return step_from_products(products, before, weight_hh)


def step_from_products(products: torch.Tensor, state: torch.Tensor, weight_hh: torch.Tensor) -> torch.Tensor:
    """Advance a bias-free GRU by one token, given the token's input products W_ih x.

    Args:
        products (`torch.Tensor`): `[..., 3G]`.
        state (`torch.Tensor`): `[..., G]`.
        weight_hh (`torch.Tensor`): `[3G, G]`.

    Returns:
        `torch.Tensor`: Next state `[..., G]`.
    """
    sizes = (2 * state.shape[-1], state.shape[-1])
    gates, new = products.split(sizes, dim=-1)
    state_gates, state_new = F.linear(state, weight_hh).split(sizes, dim=-1)
    reset, update = (gates + state_gates).sigmoid().chunk(2, dim=-1)
    return torch.lerp(torch.addcmul(new, reset, state_new).tanh(), state, update)


def correct_branches(
    base_logits: torch.Tensor,
    block_part: torch.Tensor,
    state_part: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor,
) -> torch.Tensor:
    """Reference of [`domino_kernels.correct_branches`]."""
    low_rank = block_part[:, None] + state_part  # [B, L, R]
    rows = F.embedding(candidate_ids, up_weight)  # [B, M, R]
    return (base_logits[:, None] + F.silu(low_rank) @ rows.mT).to(base_logits.dtype)
