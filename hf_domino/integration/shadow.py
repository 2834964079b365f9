"""Drift watching: replay a share of assisted calls without speculation and compare.

A replay feeds the returned tokens to the target one at a time, through Transformers' own loop, so that every law is
computed twice on the same prefix: in a verification forward and by itself. The call itself is left as it is: result,
cache, streamer and random state are the same with and without a watch.

Shapes: B batch, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable, Iterator
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
        share (`float`): Share of the calls that is replayed.
        seed (`int`): Seed of the choice.
        num_calls (`int`): Assisted calls.
        num_replayed (`int`): Of these, replayed ones.
        num_tokens (`int`): New tokens compared, over all rows; not those of sampled calls by the residual rule.
        num_laws (`int`): Laws compared, of greedy and sampled calls; a call's first token has none to compare.
        sum_kl (`float`): Sum of KL(target alone, verification) over them, in nats.
        max_kl (`float`): The largest.
        mismatches (`list[Mismatch]`): First mismatch of each row that has one.
        failures (`list[str]`): Replays that raised, by their errors; their calls returned as ever.
    """

    share: float
    seed: int = 0
    num_calls: int = 0
    num_replayed: int = 0
    num_tokens: int = 0
    num_laws: int = 0
    sum_kl: float = 0.0
    max_kl: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in [0, 1], got {self.share}. Pass the share of calls to replay, say 0.05.")
        self._random, self._lock = random.Random(self.seed), threading.Lock()

    @property
    def mean_kl(self) -> float:
        """Mean KL in nats; NaN before the first law."""
        return self.sum_kl / self.num_laws if self.num_laws else float("nan")

    @property
    def suspicious(self) -> list[Mismatch]:
        """Mismatches that rounding does not explain."""
        return [mismatch for mismatch in self.mismatches if not mismatch.is_tie]

    def __str__(self) -> str:
        lines = [
            ("calls", f"{self.num_calls}, replayed {self.num_replayed}, failed replays {len(self.failures)}"),
            ("tokens compared", f"{self.num_tokens}"),
            ("mismatches", f"{len(self.mismatches)}, of which no tie {len(self.suspicious)}"),
            ("KL, nats", f"mean {self.mean_kl:.3g}, largest {self.max_kl:.3g}, over {self.num_laws} laws"),
        ]
        details = [
            *sorted(self.mismatches, key=lambda mismatch: -mismatch.margin)[:MAX_SHOWN],
            *self.failures[:MAX_SHOWN],
        ]
        return "\n".join([*(f"{name:<20}{value}" for name, value in lines), *(f"  {detail}" for detail in details)])

    def add(self, rows: Iterable[tuple[list[float], int, Mismatch | None]], has_tokens: bool) -> None:
        """Count a replayed call by what [`~Replay.rows`] says; without tokens distributions alone are compared."""
        with self._lock:
            self.num_replayed += 1
            for kl, num_tokens, mismatch in rows:
                self.num_laws += len(kl)
                self.sum_kl += sum(kl)
                self.max_kl = max([self.max_kl, *kl])
                if has_tokens:
                    self.num_tokens += num_tokens
                    self.mismatches += [] if mismatch is None else [mismatch]

    def next_call(self) -> tuple[int, bool]:
        """Count a call; returns its number and whether to replay it."""
        with self._lock:
            self.num_calls += 1
            return self.num_calls - 1, self._random.random() < self.share


@contextmanager
def shadow(share: float = 0.05, seed: int = 0) -> Iterator[ShadowReport]:
    """Replay a share of the assisted calls inside the `with` block without speculation, and compare.

    A watched call keeps the target's logits of its new tokens until the replay is over, which takes about as long as
    plain generation. Like [`timed_phases`] it holds for the calling thread or task.

    Args:
        share (`float`, *optional*, defaults to 0.05): Share of the calls to replay, in `[0, 1]`.
        seed (`int`, *optional*, defaults to 0): Seed of the choice; the global random state is not used.

    Returns:
        [`ShadowReport`]: Grows with every call; print it at any time.

    Raises:
        ValueError: If `share` is out of range.

    Example:
    ```python
    >>> import hf_domino
    >>> with hf_domino.shadow(share=1.0) as report:
    ...     pass  # model.generate(**inputs, assistant_model=drafter)
    >>> report.num_calls, report.mismatches
    (0, [])

    ```
    """
    report = ShadowReport(share, seed)
    token = _watching.set(report)
    try:
        yield report
    finally:
        _watching.reset(token)


def watched(decode: Callable[..., Any]) -> Callable[..., Any]:
    """The decoding function itself, or inside [`shadow`] one that replays a share of its calls."""
    report = _watching.get()
    if report is None:
        return decode

    def decode_and_compare(model: PreTrainedModel, input_ids: torch.Tensor, *, drafter: Any, **kwargs: Any) -> Any:
        call, is_chosen = report.next_call()
        if not is_chosen:
            return decode(model, input_ids, drafter=drafter, **kwargs)
        wanted, replay = kwargs["generation_config"], None
        with _noting_failures(report, call):
            replay = Replay(model, input_ids, **{name: kwargs[name] for name in kwargs if name != "streamer"})
        latest_start()
        result = decode(model, input_ids, drafter=drafter, **kwargs | {"generation_config": _with_logits(wanted)})
        with _noting_failures(report, call):
            if replay is not None:
                # Calls of the residual rule, or beside others, drew from elsewhere: their tokens cannot be compared.
                start, draws = latest_start(), None
                if start is not None:
                    draws = torch.Generator(input_ids.device).set_state(start)
                replay.run(result.sequences, result.logits, draws)
                report.add(replay.rows(call), not wanted.do_sample or draws is not None)
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


@contextmanager
def _noting_failures(report: ShadowReport, call: int) -> Iterator[None]:
    """A replay that fails must not take the caller's result with it."""
    try:
        yield
    except Exception as error:
        report.failures.append(f"call {call}: {type(error).__name__}: {error}")
