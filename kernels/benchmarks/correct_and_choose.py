"""Time `correct_and_choose` at the head sizes of Qwen3-8B, against its PyTorch twin, and check every result."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import Case, Head, Outputs, check_choice, num_bytes, parse, run

from domino_kernels import correct_and_choose
from domino_kernels.noise import gumbel

TEMPERATURE = 1.0


def cases(options: argparse.Namespace) -> list[Case]:
    """The vocabulary, greedy and sampled, and a candidate pool."""
    head = Head(options)
    base, low_rank = head.base_logits[:, 0], head.block_part[:, 0]
    logits, ids = base.topk(head.sizes.pool_size, dim=1)
    random_state = torch.tensor([options.seed, 1], device=head.device)

    def sample() -> Outputs:
        return (correct_and_choose(base, low_rank, head.up_weight, temperature=TEMPERATURE, random_state=random_state),)

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
        Case("vocabulary, sampled", sample, _check_draw(head, random_state), num_bytes(head.up_weight, base)),
        Case(
            "pool",
            lambda: (correct_and_choose(logits, low_rank, head.up_weight, ids),),
            check_pool,
            num_bytes(head.up_weight[: ids.numel()], logits, ids),
        ),
    ]


def _check_draw(head: Head, random_state: torch.Tensor) -> Callable[[Outputs], None]:
    """A draw is the largest of the logits with its noise added."""
    base, low_rank = head.base_logits[:, 0], head.block_part[:, 0]
    noisy = base + TEMPERATURE * gumbel(random_state, *base.shape)
    return lambda outputs: check_choice(outputs[0], noisy, low_rank, head.up_weight)


if __name__ == "__main__":
    options = parse(__doc__)
    run("correct_and_choose", cases(options), options)
