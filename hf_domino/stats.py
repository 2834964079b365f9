"""Statistics of assisted generation: acceptance, speed and, when asked for, the time of each phase."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn

PHASES = ("draft", "rollout", "verify")

_timing_phases: ContextVar[bool] = ContextVar("timing_phases", default=False)
_last = threading.local()


@contextmanager
def timed_phases() -> Iterator[None]:
    """Time draft, rollout and verification of every assisted generation inside the `with` block.

    On a GPU each phase then ends with a synchronisation, which slows the generation that is measured.

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
    """Sums the seconds spent in named phases; does nothing unless enabled.

    Args:
        enabled (`bool`, *optional*): Defaults to whether the caller is inside [`timed_phases`].
    """

    def __init__(self, enabled: bool | None = None):
        self.enabled = _timing_phases.get() if enabled is None else enabled
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`, one of `PHASES`."""
        if not self.enabled:
            yield
            return
        start = _synchronised_now()
        yield
        self.seconds[name] += _synchronised_now() - start


def _synchronised_now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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
        phases (`dict[str, float]`, *optional*): Seconds in `draft`, `rollout` and `verify`, inside [`timed_phases`].
    """

    num_draft_tokens: int
    rows: list[list[int]] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)
    num_new_tokens: int = 0
    seconds: float = 0.0
    phases: dict[str, float] | None = None

    @classmethod
    def of_rows(cls, num_draft_tokens: int, num_rows: int) -> DecodingStats:
        """Statistics of a call that is about to begin."""
        return cls(num_draft_tokens, [[] for _ in range(num_rows)], [[] for _ in range(num_rows)])

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
        """Share of the rounds that made proposal k in which it was accepted, for k in `[0, num_draft_tokens)`.

        Empty without a round; NaN where no round went that far.
        """
        lengths = [length for row in self.rows for length in row]
        proposed = [count for row in self.proposed for count in row]
        if not lengths:
            return []
        made = [sum(count > k for count in proposed) for k in range(self.num_draft_tokens)]
        accepted = [sum(length > k + 1 for length in lengths) for k in range(self.num_draft_tokens)]
        return [here / count if count else float("nan") for here, count in zip(accepted, made, strict=True)]

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
            ("acceptance length", f"{self.acceptance_length:.2f}" if self.num_rounds else "-"),
            ("proposals a round", f"{self.proposal_length:.2f}"),
            ("single steps", f"{self.num_single_steps}"),
            ("acceptance rate at", rates or "-"),
            ("tokens/s", f"{self.tokens_per_second:.1f}"),
        ]
        lines += [(f"{name}, s", f"{seconds:.3f}") for name, seconds in (self.phases or {}).items()]
        return "\n".join(f"{name:<20}{value}" for name, value in lines)


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
