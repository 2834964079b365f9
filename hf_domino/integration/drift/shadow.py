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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_domino.decoding.noise.generators import latest_start
from hf_domino.drafter.stats import hand_out
from hf_domino.integration.drift.replay import Draws, Replay, ReplayedRow
from hf_domino.target.view import rounded_to

# Units in the last place of the largest logit. Measured in bf16: margins up to half of one behind twelve layers; deeper
# targets round more.
TIE_ROUNDINGS = 4
MAX_SHOWN = 5

_watching: ContextVar[ShadowReport | None] = ContextVar("shadow", default=None)


@dataclass(frozen=True)
class Mismatch:
    """The first token of a row that the target alone would not have written.

    Args:
        call (`int`): Which assisted call inside the block, from 0.
        row (`int`): Row of its batch.
        position (`int`): Which new token, from 0.
        token (`int`, *optional*): The token that was returned; None where the row ended too early.
        expected (`int`, *optional*): What the target alone writes there; None where a row ends in the wrong place.
        margin (`float`): By how much the target alone prefers it, in processed logits, the noise of the draw included;
            infinite where the row ended in the wrong place or the token was forbidden.
        tie (`float`): Margins up to this are what rounding does in the target's dtype.
    """

    call: int
    row: int
    position: int
    token: int | None
    expected: int | None
    margin: float
    tie: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it; otherwise suspect a bug."""
        return self.margin <= self.tie

    def __str__(self) -> str:
        place = f"call {self.call}, row {self.row}, new token {self.position}"
        if self.token is None:
            return f"{place}: the row ended, the target alone goes on. NO TIE: suspect a bug"
        if self.expected is None:
            return f"{place}: returned {self.token}, where the target alone has stopped. NO TIE: suspect a bug"
        cause = "a tie" if self.is_tie else "NO TIE: suspect a bug"
        return (
            f"{place}: returned {self.token}, target alone {self.expected}, margin {self.margin:.3g} "
            f"({cause}; rounding reaches {self.tie:.2g})"
        )


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

    def add(self, call: int, rows: list[ReplayedRow], has_tokens: bool, dtype: torch.dtype) -> None:
        """Count a replayed call.

        Args:
            call (`int`): Its number.
            rows (`list[ReplayedRow]`): What the replay gave.
            has_tokens (`bool`): Whether it is known what the target alone would have written; otherwise only laws are
                compared.
            dtype (`torch.dtype`): The target's, for what counts as a tie.
        """
        with self._lock:
            self.num_replayed += 1
            for index, row in enumerate(rows):
                kl = row.kl[1 : row.length]  # the first token's law is the prefill's in both
                self.num_laws += len(kl)
                self.sum_kl += sum(kl)
                self.max_kl = max([self.max_kl, *kl])
                if has_tokens:
                    self.num_tokens += row.length
                    self.mismatches += _first_mismatch(call, index, row, torch.finfo(dtype).eps)

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
    """The decoding function itself, or inside [`shadow`] one that replays a share of its calls.

    Args:
        decode (`Callable`): As [`~hf_domino.decoding.loop.assisted_decoding`].
    """
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
                # Calls of the residual rule, or beside others, drew from elsewhere: only their laws can be compared.
                start = latest_start()
                draws = None if start is None else Draws(start, input_ids.device)
                rows = replay.run(result.sequences, result.logits, draws)
                report.add(call, rows, not wanted.do_sample or draws is not None, rounded_to(model))
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


def _first_mismatch(call: int, index: int, row: ReplayedRow, eps: float) -> Iterator[Mismatch]:
    """The first token of a row that differs, or else a wrong end."""
    for position in range(row.length):
        token, chosen = row.tokens[position], row.chosen[position]
        if token != chosen:
            tie = TIE_ROUNDINGS * eps * row.scales[position]
            yield Mismatch(call, index, position, token, chosen, row.margins[position], tie)
            return
    if not row.end_is_known:
        return
    if row.end is None:
        yield Mismatch(call, index, len(row.tokens), None, None, float("inf"), 0.0)
        return
    surplus = [position for position in range(row.end, len(row.tokens)) if row.tokens[position] != row.pad]
    for position in surplus[:1]:
        yield Mismatch(call, index, position, row.tokens[position], None, float("inf"), 0.0)
