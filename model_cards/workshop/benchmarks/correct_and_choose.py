"""Time `correct_and_choose` at the head sizes of Qwen3-8B, against its PyTorch reference, and check every result."""

from __future__ import annotations

import argparse

import torch
from timing import Case, Head, Outputs, check_choice, num_bytes, parse, run

from domino_kernels import correct_and_choose
from domino_kernels.reference import add_noise


def cases(options: argparse.Namespace) -> list[Case]:
    """The vocabulary, greedy and sampled, and a candidate pool."""
    head = Head(options)
    base, low_rank = head.base_logits[:, 0], head.block_part[:, 0]
    logits, ids = base.topk(head.sizes.pool_size, dim=1)
    noise = torch.empty_like(base).exponential_(generator=head.generator)

    def check_pool(outputs: Outputs) -> None:
        outside = torch.full_like(base, -1e4).scatter(1, ids, logits)
        check_choice(outputs[0], outside, low_rank, head.up_weight)

    return [
        Case(
            "vocabulary",
            lambda: (correct_and_choose(base, low_rank, head.up_weight),),
            lambda outputs: check_choice(outputs[0], base, low_rank, head.up_weight),
            num_bytes(head.up_weight, base),
        ),
        Case(
            "vocabulary, sampled",
            lambda: (correct_and_choose(base, low_rank, head.up_weight, noise=noise),),
            lambda outputs: check_choice(outputs[0], add_noise(base, noise), low_rank, head.up_weight),
            num_bytes(head.up_weight, base, noise),
        ),
        Case(
            "pool",
            lambda: (correct_and_choose(logits, low_rank, head.up_weight, ids),),
            check_pool,
            num_bytes(head.up_weight[: ids.numel()], logits, ids),
        ),
    ]


if __name__ == "__main__":
    options = parse(__doc__)
    run("correct_and_choose", cases(options), options)
