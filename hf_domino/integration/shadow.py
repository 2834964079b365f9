"""Drift watching: replay assisted calls without speculation and compare their tokens.

A replay feeds the returned tokens to the target one at a time, through Transformers' own loop. The call itself is left
as it is: result, cache, streamer and random state are the same with and without a watch.

Shapes: B batch, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_domino.decoding.noise import latest_start
from hf_domino.drafter.stats import hand_out
from hf_domino.integration.replay import Mismatch, Replay

MAX_SHOWN = 5

_watching: ContextVar[ShadowReport | None] = ContextVar("shadow", default=None)


@dataclass
class ShadowReport:
    """What a watch has seen so far; printing it shows a summary.

    Args:
        num_calls (`int`): Assisted calls.
        num_tokens (`int`): New tokens compared, over all rows; not those of sampled calls by the residual rule.
        mismatches (`list[Mismatch]`): First mismatch of each row that has one.
    """

    num_calls: int = 0
    num_tokens: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def suspicious(self) -> list[Mismatch]:
        """Mismatches that rounding does not explain."""
        return [mismatch for mismatch in self.mismatches if not mismatch.is_tie]

    def __str__(self) -> str:
        found = f"{len(self.mismatches)}, of which no tie {len(self.suspicious)}"
        worst = sorted(self.mismatches, key=lambda mismatch: -mismatch.margin)[:MAX_SHOWN]
        counted = f"{self.num_tokens} tokens compared in {self.num_calls} calls, mismatches: {found}"
        return "\n  ".join([counted, *map(str, worst)])


@contextmanager
def shadow() -> Iterator[ShadowReport]:
    """Replay the assisted calls inside the `with` block without speculation, and compare.

    A watched call keeps the target's logits of its new tokens until the replay is over, which takes about as long as
    plain generation. Like [`timed_phases`] it holds for the calling thread or task.

    Returns:
        [`ShadowReport`]: Grows with every call; print it at any time.

    Example:
    ```python
    >>> import hf_domino
    >>> with hf_domino.shadow() as report:
    ...     pass  # model.generate(**inputs, assistant_model=drafter)
    >>> report.num_calls, report.mismatches
    (0, [])

    ```
    """
    report = ShadowReport()
    token = _watching.set(report)
    try:
        yield report
    finally:
        _watching.reset(token)


def watched(decode: Callable[..., Any]) -> Callable[..., Any]:
    """The decoding function itself, or inside [`shadow`] one that replays its calls."""
    report = _watching.get()
    if report is None:
        return decode

    def decode_and_compare(model: PreTrainedModel, input_ids: torch.Tensor, *, drafter: Any, **kwargs: Any) -> Any:
        wanted = kwargs["generation_config"]
        replay = Replay(model, input_ids, **{name: kwargs[name] for name in kwargs if name != "streamer"})
        latest_start()
        result = decode(model, input_ids, drafter=drafter, **kwargs | {"generation_config": _with_logits(wanted)})
        # Calls of the residual rule, or beside others, drew from elsewhere: their tokens cannot be compared.
        if (start := latest_start()) is not None or not wanted.do_sample:
            draws = None if start is None else torch.Generator(input_ids.device).set_state(start)
            replay.run(result.sequences, result.logits, draws)
            for num_tokens, mismatch in replay.rows(report.num_calls):
                report.num_tokens += num_tokens
                report.mismatches += [] if mismatch is None else [mismatch]
        report.num_calls += 1
        if not wanted.return_dict_in_generate:
            return result.sequences
        if wanted.output_logits:
            return result
        without = type(result)(**{k: v for k, v in result.items() if k != "logits"})
        hand_out(without, result.stats)
        return without

    return decode_and_compare


def _with_logits(config: GenerationConfig) -> GenerationConfig:
    """The same call with raw logits in its result, and with nothing else that was not asked for."""
    config = copy.copy(config)
    if not config.return_dict_in_generate:
        config.output_scores = config.output_attentions = config.output_hidden_states = False
    config.return_dict_in_generate = config.output_logits = True
    return config
