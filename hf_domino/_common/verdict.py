"""Write the last sentence of a speed measurement: how much faster drafting is, or what to do instead."""

from __future__ import annotations

import os

LEAST_GAIN = 0.05  # relative to plain generation; smaller gains are within the timing error of a few prompts
MIN_FORWARDS = 16  # with fewer forwards, a delay of a single one can decide the result
BUSY_LOAD = 1.25  # runnable threads per core; a command that runs alone has at most one per core
STOP = "generate without it here"
WAY_OUT = f"{STOP}, or train it on until its rounds bring more tokens"


def gains(speed_up: float) -> bool:
    """Return whether a speed-up is larger than the timing error."""
    return speed_up > 1 + LEAST_GAIN


def load_per_core() -> float | None:
    """Return the runnable threads per core, averaged over the last minute; None if the system does not report them."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None


def why_busy(load: float | None) -> str:
    """Return a remark that other programs disturbed a measurement, or an empty string if the load per core is low."""
    if load is None or load < BUSY_LOAD:
        return ""
    return f"other programs kept the machine busy (load {load:.1f} per core), so measure again when it is idle"


def busy_hint(load: float | None) -> str:
    """Return what to do if other programs keep the machine busy, or an empty string if the load per core is low."""
    if load is None or load < BUSY_LOAD:
        return ""
    return f"other programs keep the machine busy (load {load:.1f} per core): --threads 1 can be many times as fast now"


def speed(tokens_per_second: float) -> str:
    """Return a speed with two digits or more.

    Example:
    ```python
    >>> from hf_domino._common.verdict import speed
    >>> [speed(value) for value in (0.345, 2.04, 9.96, 123.4)]
    ['0.34 tokens/s', '2.0 tokens/s', '10 tokens/s', '123 tokens/s']

    ```
    """
    digits = 0
    if tokens_per_second < 9.95:
        digits = 1 if tokens_per_second >= 0.995 else 2
    return f"{tokens_per_second:.{digits}f} tokens/s"


def verdict(
    speed_up: float,
    who: str,
    counted: str = "",
    way_out: str = WAY_OUT,
    note: str = "",
    num_forwards: int = MIN_FORWARDS,
) -> str:
    """Say in one sentence whether `who` is faster than plain generation and, if it is not, what to do instead.

    A `note` is always included, and replaces `way_out`. With fewer than `MIN_FORWARDS` forwards there is no verdict.

    Example:
    ```python
    >>> from hf_domino._common.verdict import slower_in, verdict
    >>> verdict(1.8, "my-drafter", slower_in([1.9, 1.7]))
    'Faster than plain: 1.80 x with my-drafter, slower than plain in 0 of 2 prompts.'
    >>> verdict(0.8, "my-drafter", way_out="generate without it")
    'Slower than plain: 0.80 x with my-drafter; generate without it.'
    >>> verdict(0.8, "my-drafter", num_forwards=9)
    'Inconclusive: 9 forwards with my-drafter are too few to time; generate more tokens.'

    ```
    """
    if num_forwards < MIN_FORWARDS:
        return f"Inconclusive: {num_forwards} forwards with {who} are too few to time; generate more tokens."
    how = "About as fast as plain"
    if gains(speed_up):
        how = "Faster than plain"
    elif speed_up < 1 - LEAST_GAIN:
        how = "Slower than plain"
    sentence = f"{how}: {speed_up:.2f} x with {who}"
    if counted:
        sentence += f", {counted}"
    if not note and not gains(speed_up):
        note = way_out
    if note:
        sentence += f"; {note}"
    return f"{sentence}."


def slower_in(speed_ups: list[float]) -> str:
    """Say how many prompts were slower than plain generation, given the speed-up of each prompt."""
    return f"slower than plain in {sum(ratio < 1 for ratio in speed_ups)} of {len(speed_ups)} prompts"
