"""What a training step of the backbone costs, with what blocks do not see left out and under the dense mask.

    python -m hf_domino.evaluation.benchmark.attention --attention tiles
    python -m hf_domino.evaluation.benchmark.attention --attention dense

A process measures one of them, since the peak of its memory is of all that it did. On a GPU `tiles` is flex attention.

Shapes: S context positions, N blocks, K block size, H hidden size.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from typing import Any

import torch

from hf_domino._common.provenance import provenance
from hf_domino.configuration import DominoConfig
from hf_domino.drafter import backbone
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.view import BlockView

EVERYTHING = sys.maxsize  # scores up to which the dense mask is taken


def measure_step(options: argparse.Namespace) -> dict[str, Any]:
    """Run some steps, forward and backward, of a backbone of random weights over random context features.

    Args:
        options (`argparse.Namespace`): Flags of this module.

    Returns:
        `dict`: `seconds` (median) and `cpu_seconds` of a step, `peak_mb` of the process or of the GPU, and what was
        measured where.
    """
    if options.attention == "dense":
        backbone.MAX_DENSE_SCORES, backbone.can_flex = EVERYTHING, lambda queries: False
    torch.manual_seed(0)
    device, size, heads = torch.device(options.device), options.hidden_size, options.hidden_size // 64
    config = DominoConfig(
        hidden_size=size, intermediate_size=3 * size, num_hidden_layers=options.num_layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // options.heads_per_key_head), head_dim=64, block_size=options.block_size,
        projector_type="dflash", vocab_size=1000, mask_token_id=3,
    )  # fmt: skip
    drafter = DominoDraftModel(config).to(device).train()
    anchors = torch.randperm(options.length)[: options.num_anchors].sort().values[None].to(device)
    places = torch.arange(options.length, device=device)[None]
    positions = (anchors[..., None] + torch.arange(options.block_size, device=device)).flatten(1)
    context, noise = (torch.randn(1, count, size, device=device) for count in (options.length, positions.shape[1]))
    context.requires_grad_()
    seconds, cpu_seconds = [], []
    for _ in range(options.repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        # Made anew for each batch, as in training.
        view = BlockView.at(anchors, options.block_size, options.length)
        drafter(noise, positions, context, places, view=view).square().mean().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    # The first step warms up; it counts where it is the only one.
    cost = {"seconds": statistics.median(seconds[1:] or seconds), "cpu_seconds": min(cpu_seconds)}
    return cost | {"peak_mb": _peak(device)} | vars(options) | provenance(options.device)


def _peak(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=("tiles", "dense"), default="tiles")
    parser.add_argument("--length", type=int, default=3072, help="context positions")
    parser.add_argument("--num-anchors", type=int, default=256, help="blocks")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--heads-per-key-head", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(measure_step(_parse())))
