"""One generation: its time, and its rounds where Transformers' own loop makes them.

Timed generations run without a streamer, which would make some loops wait for the device at every token.

Shapes: B batch, N new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` returns, and the seconds until the device has done it."""
    _synchronize(device)
    start = time.perf_counter()
    result = work()
    _synchronize(device)
    return result, time.perf_counter() - start


def generate_timed(target: Any, inputs: Any, **arguments: Any) -> tuple[torch.Tensor, float]:
    """New token ids `[B, N]` of one generation, and seconds from call to return."""
    output, seconds = timed(target.device, partial(target.generate, **inputs, **arguments))
    return output[:, inputs["input_ids"].shape[1] :], seconds


class _RoundStreamer(BaseStreamer):
    """Counts tokens: Transformers' assisted loop streams what one round committed at once."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Take what is streamed."""
        self.counts.append(value.numel())

    def end(self) -> None:
        """Do nothing."""


def streamed_rounds(target: Any, inputs: Any, **arguments: Any) -> list[int]:
    """Tokens that each round of Transformers' own assisted loop returned; the forward over the prompt is no round."""
    streamer = _RoundStreamer()
    target.generate(**inputs, streamer=streamer, **arguments)
    return streamer.counts[2:]  # the prompt, the forward over it, the rounds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
