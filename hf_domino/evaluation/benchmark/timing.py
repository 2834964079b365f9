"""One generation: its time, the time to its first token, its rounds, its memory.

Timed generations run without a streamer, which would make some loops wait for the device at every token.

Shapes: B batch, T prompt tokens, N new tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.generation.streamers import BaseStreamer


def generate_timed(target: Any, inputs: Any, **arguments: Any) -> tuple[torch.Tensor, float]:
    """Generate once and take the time.

    Returns:
        `tuple[torch.Tensor, float]`: New token ids `[B, N]`, and seconds from call to return.
    """
    _synchronize(target.device)
    start = time.perf_counter()
    output = target.generate(**inputs, **arguments)
    _synchronize(target.device)
    return output[:, inputs["input_ids"].shape[1] :], time.perf_counter() - start


class _FirstToken(Exception):
    """Breaks off a generation that has streamed its first tokens."""


class _FirstTokenStreamer(BaseStreamer):
    """Lets the prompt pass, which `generate` streams before all else, and nothing after it."""

    def __init__(self) -> None:
        self.has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take what is streamed."""
        if self.has_prompt:
            raise _FirstToken
        self.has_prompt = True

    def end(self) -> None:
        """Do nothing."""


def first_token_seconds(target: Any, inputs: Any, **arguments: Any) -> float:
    """Seconds from call to the first streamed token, where the generation is broken off."""
    streamer = _FirstTokenStreamer()
    if "custom_generate" in arguments:  # `generate` keeps the streamer from a loop that it is given
        arguments["token_streamer"] = streamer
    _synchronize(target.device)
    start = time.perf_counter()
    try:
        target.generate(**inputs, streamer=streamer, **arguments)
    except _FirstToken:
        _synchronize(target.device)
        return time.perf_counter() - start
    raise AssertionError("generate returned without streaming a token")


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
    """What each round of Transformers' own assisted loop returned; the forward over the prompt is no round."""
    streamer = _RoundStreamer()
    target.generate(**inputs, streamer=streamer, **arguments)
    return streamer.counts[2:]  # the prompt, the forward over it, the rounds


class PeakMemory:
    """Most memory of a CUDA device that a method alone would need: its weights, each once, and what a generation adds.

    On a CPU there is no such figure: an allocator that keeps what it once had says nothing of a single call.
    """

    def __init__(self, models: Iterable[nn.Module]):
        weights = {weight.data_ptr(): weight for weight in itertools.chain(*(model.parameters() for model in models))}
        self._device = next(iter(weights.values())).device
        self._weights = sum(weight.nbytes for weight in weights.values())
        self._before = 0

    def start(self) -> None:
        """Begin before a generation."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def read(self) -> int | None:
        """Bytes since `start`; None on a CPU."""
        if self._device.type != "cuda":
            return None
        return self._weights + torch.cuda.max_memory_allocated(self._device) - self._before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
