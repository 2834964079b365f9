"""Time `gru_step` at the head sizes of Qwen3-8B, against its PyTorch reference, and check every result."""

from __future__ import annotations

import argparse

from timing import Case, Head, Outputs, check_state, num_bytes, parse, run

from domino_kernels import gru_step, reference


def cases(options: argparse.Namespace) -> list[Case]:
    """Token ids with a table to look them up in, and ready embeddings."""
    head = Head(options)
    weights = head.state, head.weight_ih, head.weight_hh
    embeds = head.embedding[head.tokens]
    expected = reference.gru_step(embeds, *weights)

    def check(outputs: Outputs) -> None:
        check_state(outputs[0], expected)

    return [
        Case("ids", lambda: (gru_step(head.tokens, *weights, head.embedding),), check, num_bytes(*weights, embeds)),
        Case("embeddings", lambda: (gru_step(embeds, *weights),), check, num_bytes(*weights, embeds)),
    ]


if __name__ == "__main__":
    options = parse(__doc__)
    run("gru_step", cases(options), options)
