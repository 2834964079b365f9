"""Time one depth of a tree at the head sizes of Qwen3-8B, against the PyTorch references, and check every result.

A depth embeds the tokens that branches go on by, advances the states of their owners, adds the states' part to the low
rank and corrects the candidates for each branch. Excluded are the chances of children and the choice among them.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from timing import Case, Head, Outputs, check_state, num_bytes, parse, run

from domino_kernels import advance_branches, correct_branches, reference

SCORE_ULPS = 2  # one of the correction, one of the sum


def cases(options: argparse.Namespace) -> list[Case]:
    """Each operation, and a depth from tokens to corrected logits."""
    head = Head(options)
    shape = options.batch_size, head.sizes.num_branches
    tokens = torch.randint(head.sizes.vocab_size, shape, generator=head.generator, device=head.device)  # [B, L]
    owners = torch.randint(shape[1], shape, generator=head.generator, device=head.device)
    states = head.random(*shape, head.sizes.state_size).tanh()  # [B, L, G]
    products = F.linear(head.embedding[tokens], head.weight_ih)  # [B, L, 3G]
    state_part = F.linear(states, head.weight_state)  # [B, L, R]
    logits, ids = head.base_logits[:, 0].topk(head.sizes.pool_size, dim=1)  # [B, M]
    others = head.block_part[:, 0], state_part, head.up_weight, ids
    rows_of_pool = head.up_weight[: ids.numel()]

    def depth() -> Outputs:
        gates = F.linear(F.embedding(tokens, head.embedding), head.weight_ih)
        advanced = advance_branches(gates, states, owners, head.weight_hh)
        part = F.linear(advanced, head.weight_state)
        return advanced, part, correct_branches(logits, head.block_part[:, 0], part, head.up_weight, ids)

    def check_states(outputs: Outputs) -> None:
        check_state(outputs[0], reference.advance_branches(products, states, owners, head.weight_hh))

    def check_depth(outputs: Outputs) -> None:
        check_states(outputs)
        check_scores(outputs[2], logits, others[0], outputs[1], *others[2:])

    return [
        Case(
            "advance",
            lambda: (advance_branches(products, states, owners, head.weight_hh),),
            check_states,
            num_bytes(products, states, owners, head.weight_hh),
        ),
        Case(
            "correct",
            lambda: (correct_branches(logits, *others),),
            lambda outputs: check_scores(outputs[0], logits, *others),
            num_bytes(logits, *others[:2], rows_of_pool, ids),
        ),
        Case(
            "depth",
            depth,
            check_depth,
            num_bytes(head.weight_ih, head.weight_hh, head.weight_state, rows_of_pool, states, logits, ids),
        ),
    ]


def check_scores(scores: torch.Tensor, base_logits: torch.Tensor, *others: torch.Tensor) -> None:
    """Check corrected logits `[B, L, M]` against the exact ones of the same low rank."""
    block_part, state_part, up_weight, ids = others
    low_rank = block_part[:, None] + state_part
    rows = up_weight[ids].double()  # [B, M, R]
    exact = base_logits[:, None].double() + F.silu(low_rank).double() @ rows.mT
    tolerance = SCORE_ULPS * torch.finfo(up_weight.dtype).eps * exact.abs().max().item()
    torch.testing.assert_close(scores.double(), exact, atol=tolerance, rtol=0)


if __name__ == "__main__":
    options = parse(__doc__)
    run("branches", cases(options), options)
