"""Measures the time that each phase of a round takes, on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_domino._common.blocks import Setting

PHASES = ("draft", "correction", "target_forward", "verify", "rest")

_timing_phases = Setting("timing_phases", default=False)


@contextmanager
def timed_phases() -> Iterator[None]:
    """Time the phases of every round of every assisted generation inside the `with` block.

    On a GPU, events mark the phases. They are read once at the end, so that nothing is synchronised before that.

    Example:
    ```python
    >>> import hf_domino
    >>> with hf_domino.timed_phases():
    ...     pass  # model.generate(**inputs, assistant_model=drafter); print(drafter.stats)

    ```
    """
    with _timing_phases.within(True):
        yield


class PhaseTimer:
    """Times named phases, if enabled; the time of a nested phase does not count towards the outer one."""

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
        outer = self._open[-1] if self._open else None
        start = self._mark()
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            self._marks.append((name, outer, start, self._mark()))

    def reset(self) -> None:
        """Discard everything marked so far, such as the prefill."""
        self._marks.clear()

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each of `PHASES`."""
        if self._is_cuda and self._marks:
            torch.cuda.synchronize()
        total = dict.fromkeys(PHASES, 0.0)
        for name, outer, start, end in self._marks:
            if self._is_cuda:
                elapsed = start.elapsed_time(end) / 1000
            else:
                elapsed = end - start
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
