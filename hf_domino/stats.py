"""Statistics of assisted generation: acceptance, speed and, when asked for, the time of each phase."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PHASES = ("draft", "rollout", "target_forward", "verify", "rest")

_timing_phases: ContextVar[bool] = ContextVar("timing_phases", default=False)
_last = threading.local()


@contextmanager
def timed_phases() -> Iterator[None]:
    """Time the phases of every round of every assisted generation inside the `with` block.

    On a GPU the phases are marked by events, which are read once at the end: nothing is synchronised meanwhile.

    Example:
    ```python
    >>> import hf_domino
    >>> with hf_domino.timed_phases():
    ...     pass  # model.generate(**inputs, assistant_model=drafter); print(drafter.stats)

    ```
    """
    token = _timing_phases.set(True)
    try:
        yield
    finally:
        _timing_phases.reset(token)


class PhaseTimer:
    """Times named phases; does nothing unless enabled. A phase inside another one is not counted in the outer one.

    Args:
        enabled (`bool`, *optional*): Defaults to whether the caller is inside [`timed_phases`].
        device (`torch.device`, *optional*): Where the phases compute; defaults to the CPU.
    """

    def __init__(self, enabled: bool | None = None, device: torch.device | None = None):
        self.enabled = _timing_phases.get() if enabled is None else enabled
        self._is_cuda = device is not None and device.type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str, str | None, Any, Any]] = []  # phase, the one around it, start, end

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`, one of `PHASES`."""
        if not self.enabled:
            yield
            return
        outer, start = self._open[-1] if self._open else None, self._mark()
        self._open.append(name)
        yield
        self._open.pop()
        self._marks.append((name, outer, start, self._mark()))

    def reset(self) -> None:
        """Forget what was marked so far, such as the prefill."""
        self._marks.clear()

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each of `PHASES`."""
        if self._is_cuda and self._marks:
            torch.cuda.synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for name, outer, start, end in self._marks:
            elapsed = start.elapsed_time(end) / 1000 if self._is_cuda else end - start
            total[name] += elapsed
            if outer is not None:
                total[outer] -= elapsed
        return total

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class DecodingStats:
    """What one assisted `generate` did.

    Args:
        num_draft_tokens (`int`): Most proposals per round (P).
        rows (`list[list[int]]`): Per row of the batch, the acceptance length of each round: accepted proposals and the
            bonus token, before any cut by an end-of-text token or the budget. Prefill is not a round.
        proposed (`list[list[int]]`): Per row, how many tokens each round proposed; 0 for a single step of the target.
        num_new_tokens (`int`): Tokens returned, over all rows.
        seconds (`float`): Wall time of the decoding loop, prefill included.
        phases (`dict[str, float]`, *optional*): Seconds of all rounds, prefill not counted, inside [`timed_phases`]:
            `draft` (the drafter's forward), `rollout`, `target_forward`, `verify` (choosing and committing) and `rest`.
            Their sum is the whole.
        target (`str`, *optional*): In what the target differs from the one the drafter was trained for, such as dtype,
            name or an adapter; None if in nothing, or if the drafter's configuration does not say.
    """

    num_draft_tokens: int
    rows: list[list[int]] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)
    num_new_tokens: int = 0
    seconds: float = 0.0
    phases: dict[str, float] | None = None
    target: str | None = None

    @classmethod
    def of_rows(cls, num_draft_tokens: int, num_rows: int, target: str | None = None) -> DecodingStats:
        """Statistics of a call that is about to begin."""
        return cls(num_draft_tokens, [[] for _ in range(num_rows)], [[] for _ in range(num_rows)], target=target)

    @property
    def acceptance_lengths(self) -> list[int] | list[list[int]]:
        """Acceptance length of each round; one list per row for a batch."""
        return self.rows[0] if len(self.rows) == 1 else self.rows

    @property
    def num_rounds(self) -> int:
        """Verifications, over all rows."""
        return sum(len(row) for row in self.rows)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification, bonus included; NaN without a round."""
        return sum(sum(row) for row in self.rows) / self.num_rounds if self.num_rounds else float("nan")

    @property
    def acceptance_rate_at(self) -> list[float]:
        """Share of rounds that accepted proposal k, for k in `[0, num_draft_tokens)`; empty without a round.

        A round that made fewer proposals did not accept it; the sum is the acceptance length less one.
        """
        lengths = [length for row in self.rows for length in row]
        return [sum(n > k + 1 for n in lengths) / len(lengths) for k in range(self.num_draft_tokens)] if lengths else []

    @property
    def proposal_length(self) -> float:
        """Mean proposals of the rounds that drafted; NaN if none did."""
        counts = [count for row in self.proposed for count in row if count]
        return sum(counts) / len(counts) if counts else float("nan")

    @property
    def num_single_steps(self) -> int:
        """Rounds without proposals, over all rows: drafting did not pay there, or nothing was left to draft."""
        return sum(count == 0 for row in self.proposed for count in row)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, prefill included."""
        return self.num_new_tokens / self.seconds if self.seconds else float("nan")

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rate_at)
        lines = [
            ("rounds", f"{self.num_rounds}"),
            ("new tokens", f"{self.num_new_tokens}"),
            ("  without proposals", f"{self.num_single_steps}"),
            ("  proposals in others", "-" if math.isnan(self.proposal_length) else f"{self.proposal_length:.2f}"),
            ("acceptance length", f"{self.acceptance_length:.2f}" if self.num_rounds else "-"),
            ("acceptance rate at", rates or "-"),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
        ]
        lines += [("target", self.target)] if self.target else []
        lines += [(f"{name}, s", f"{seconds:.3f}") for name, seconds in (self.phases or {}).items()]
        return "\n".join(f"{name:<24}{value}" for name, value in lines)


def record_stats(drafter: nn.Module, stats: DecodingStats) -> None:
    """Make `stats` what `drafter.stats` returns in the calling thread."""
    if not hasattr(_last, "by_drafter"):
        _last.by_drafter = weakref.WeakKeyDictionary()
    _last.by_drafter[drafter] = stats


def last_stats(drafter: nn.Module) -> DecodingStats:
    """Statistics of the calling thread's last assisted generation with `drafter`.

    Raises:
        RuntimeError: If there was none.
    """
    stats = getattr(_last, "by_drafter", {}).get(drafter)
    if stats is None:
        raise RuntimeError(
            "drafter.stats is empty: call model.generate(..., assistant_model=drafter) in this thread first."
        )
    return stats
