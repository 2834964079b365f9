"""Time one generation, and count its rounds if Transformers' own loop runs them.

Timed generations run without a streamer, because a streamer makes some loops wait for the device at every token.

Shapes: B batch, N new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from hf_domino.targets.packed import packed_linears


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of `work`, and the seconds until the device has finished it."""
    _synchronize(device)
    start = time.perf_counter()
    result = work()
    _synchronize(device)
    return result, time.perf_counter() - start


def generate_timed(target: Any, inputs: Any, is_packed: bool = False, **arguments: Any) -> tuple[torch.Tensor, float]:
    """Return the new token ids `[B, N]` of one generation, and the seconds from call to return."""

    def generate() -> torch.Tensor:
        with packed_linears(target) if is_packed else nullcontext():
            return target.generate(**inputs, **arguments)

    output, seconds = timed(target.device, generate)
    return output[:, inputs["input_ids"].shape[1] :], seconds


def streamed_rounds(target: Any, inputs: Any, **arguments: Any) -> list[int]:
    """Return the number of tokens in each round of Transformers' assisted loop, without the forward over the prompt."""
    counts: list[int] = []
    # The assisted loop streams all tokens of a round at once.
    streamer = SimpleNamespace(put=lambda value: counts.append(value.numel()), end=lambda: None)
    target.generate(**inputs, streamer=streamer, **arguments)
    return counts[2:]  # the prompt, the forward over it, the rounds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
