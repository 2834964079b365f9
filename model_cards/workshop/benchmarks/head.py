"""Time the whole correction head, 16 steps in one CUDA graph, at the sizes of Qwen3-8B; check every step.

A step reads a token with the GRU, adds the state's part to the low-rank pre-activation, corrects and chooses. Excluded
are what comes once per block: the lm_head, the GEMM of the draft hidden states, and for the pool its top-k, which has a
row of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import Case, Head, Outputs, check_choice, check_state, num_bytes, parse, run

from domino_kernels import correct_and_choose, gru_step, reference

Choose = Callable[[int, torch.Tensor], torch.Tensor]  # position and low rank [B, R] to ids [B]


def cases(options: argparse.Namespace) -> list[Case]:
    """Exact choice from the vocabulary, choice from candidate pools, and what the pools take to find."""
    head = Head(options)
    logits, ids = head.base_logits.topk(head.sizes.pool_size, dim=2)  # [B, P, M]
    outside = torch.full_like(head.base_logits, -1e4).scatter(2, ids, logits)
    recurrent = head.weight_ih, head.weight_hh, head.weight_state
    steps = head.sizes.num_draft_tokens

    def from_vocabulary(index: int, low_rank: torch.Tensor) -> torch.Tensor:
        return correct_and_choose(head.base_logits[:, index], low_rank, head.up_weight)

    def from_pool(index: int, low_rank: torch.Tensor) -> torch.Tensor:
        return correct_and_choose(logits[:, index], low_rank, head.up_weight, ids[:, index])

    def check_pools(outputs: Outputs) -> None:
        assert torch.equal(outputs[0], logits)

    return [
        Case(
            "vocabulary",
            lambda: rollout(head, from_vocabulary),
            lambda outputs: check(head, outputs, head.base_logits),
            steps * num_bytes(*recurrent, head.up_weight) + num_bytes(head.base_logits),
        ),
        Case(
            "pool",
            lambda: rollout(head, from_pool),
            lambda outputs: check(head, outputs, outside),
            steps * num_bytes(*recurrent, head.up_weight[: ids[:, 0].numel()]) + num_bytes(logits, ids),
        ),
        Case(
            "top-k of the pools",
            lambda: tuple(head.base_logits.topk(head.sizes.pool_size, dim=2)),
            check_pools,
            num_bytes(head.base_logits),
        ),
    ]


def rollout(head: Head, choose: Choose) -> Outputs:
    """Choose all proposals.

    Returns:
        `tuple[torch.Tensor, ...]`: Tokens `[B, P]`, states `[B, P, G]` and low-rank pre-activations `[B, P, R]`.
    """
    token, state = head.tokens, torch.zeros_like(head.state)
    tokens, states, low_ranks = [], [], []
    for index in range(head.sizes.num_draft_tokens):
        state = gru_step(token, state, head.weight_ih, head.weight_hh, head.embedding)
        low_rank = torch.addmm(head.block_part[:, index], state, head.weight_state.T)
        token = choose(index, low_rank)
        tokens.append(token)
        states.append(state)
        low_ranks.append(low_rank)
    return torch.stack(tokens, dim=1), torch.stack(states, dim=1), torch.stack(low_ranks, dim=1)


def check(head: Head, outputs: Outputs, base_logits: torch.Tensor) -> None:
    """Check every step from what came before it, so that a tie at one does not count against the next."""
    tokens, states, low_ranks = outputs
    token, state = head.tokens, torch.zeros_like(head.state)
    for index in range(tokens.shape[1]):
        check_state(states[:, index], reference.gru_step(token, state, head.weight_ih, head.weight_hh, head.embedding))
        token, state = tokens[:, index], states[:, index]
        check_choice(token, base_logits[:, index], low_ranks[:, index], head.up_weight)


if __name__ == "__main__":
    options = parse(__doc__)
    run("head", cases(options), options)
