"""Constraints of callers: `prefix_allowed_tokens_fn`, which is never asked about a text that it has forbidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

MOST_REMEMBERED = 128  # texts that a caller's function was asked about: those of a round and its drafts


class _Remembered:
    """A caller's `prefix_allowed_tokens_fn`, asked once about each of the latest texts."""

    def __init__(self, function: Callable[[int, torch.Tensor], Any]):
        self._function = function
        self._known: dict[tuple[int, bytes], Any] = {}

    def __call__(self, prompt: int, ids: torch.Tensor) -> Any:
        key = (prompt, ids.cpu().numpy().tobytes())
        if key not in self._known:
            answer = self._function(prompt, ids)
            if len(self._known) >= MOST_REMEMBERED:
                del self._known[next(iter(self._known))]  # the one asked first
            self._known[key] = answer
        return self._known[key]


def remembering(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor itself, or one like it whose caller is asked once about each text."""
    if type(processor) is not hf.PrefixConstrainedLogitsProcessor:
        return processor
    return hf.PrefixConstrainedLogitsProcessor(_Remembered(processor._prefix_allowed_tokens_fn), processor._num_beams)


def allows(processor: Any, row: int, text: torch.Tensor, start: int) -> bool:
    """Whether a caller's function allows each token of a text from a place on, and has an answer behind the last one.

    It is not asked behind a token that it forbids. It has no answer where it raises or returns nothing: it need not
    know a text that is only proposed. What it says at the first place is not judged.

    Args:
        processor (`PrefixConstrainedLogitsProcessor`): Asks the caller.
        row (`int`): Row of the batch.
        text (`torch.Tensor`): Ids `[T]`.
        start (`int`): Place of the first token in question.
    """
    ask = processor._prefix_allowed_tokens_fn
    prompt = row // processor._num_beams
    if len(text) == start:
        return True
    try:
        for place, token in enumerate(text[start:].tolist(), start=start):
            if token not in ask(prompt, text[:place]):
                return False
        return len(ask(prompt, text)) > 0
    except Exception:  # of any class, as it is the caller's; it is raised if the text is ever written
        return False
