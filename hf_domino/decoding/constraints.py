"""Constraints of callers: `prefix_allowed_tokens_fn`, which is never called for a text that it has forbidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

MOST_REMEMBERED = 128  # how many texts have their answers cached, enough for a round and its drafts


class _Remembered:
    """A caller's `prefix_allowed_tokens_fn` with a cache, so that it is called once for each recent text."""

    def __init__(self, function: Callable[[int, torch.Tensor], Any]):
        self._function = function
        self._known: dict[tuple[int, bytes], torch.Tensor] = {}

    def __call__(self, prompt: int, ids: torch.Tensor) -> torch.Tensor:
        key = (prompt, ids.cpu().numpy().tobytes())
        if key not in self._known:
            answer = self._function(prompt, ids)
            if len(self._known) >= MOST_REMEMBERED:
                del self._known[next(iter(self._known))]  # the oldest one
            # A copy, because the function may refill what it returns when it is asked about the next text.
            self._known[key] = torch.as_tensor(answer).clone()
        return self._known[key]


def remembering(processor: LogitsProcessor) -> LogitsProcessor:
    """The processor itself, or, if it calls a caller's function, a copy that calls the function once per text."""
    if type(processor) is not hf.PrefixConstrainedLogitsProcessor:
        return processor
    return hf.PrefixConstrainedLogitsProcessor(_Remembered(processor._prefix_allowed_tokens_fn), processor._num_beams)


def allows(processor: Any, row: int, text: torch.Tensor, start: int) -> bool:
    """Whether a caller's function allows every token of a text from `start` on, and has an answer after the last one.

    The function is not called for a text with a token that it forbids. It has no answer if it raises an exception or
    returns nothing, because it need not support texts that are only proposed. If no token is in question, it is not
    called.

    Args:
        processor (`PrefixConstrainedLogitsProcessor`): The processor that calls the caller's function.
        row (`int`): Index of the sequence in the batch.
        text (`torch.Tensor`): Token ids `[T]`.
        start (`int`): Index of the first token in question.
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
    except Exception:  # the caller's function can raise any class; it will raise again if the text is ever committed
        return False
