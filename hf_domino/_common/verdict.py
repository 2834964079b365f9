"""Write the last sentence of a measurement of speed: how much faster it is, or what to do instead."""

from __future__ import annotations

LEAST_GAIN = 0.05  # share of plain generation's speed; smaller gains are within the error of a clock over a few prompts
WAY_OUT = "generate without it here, or train it on until its rounds bring more tokens"


def gains(speed_up: float) -> bool:
    """Return whether a speed-up is larger than the error of a clock."""
    return speed_up > 1 + LEAST_GAIN


def verdict(speed_up: float, who: str, counted: str = "", way_out: str = WAY_OUT) -> str:
    """Say in one sentence whether `who` is faster than plain generation, and if it is not, name the way out.

    Example:
    ```python
    >>> from hf_domino._common.verdict import slower_in, verdict
    >>> verdict(1.8, "my-drafter", slower_in([1.9, 1.7]))
    'Faster than plain: 1.80 x with my-drafter, slower than plain in 0 of 2 prompts.'
    >>> verdict(0.8, "my-drafter", way_out="generate without it")
    'Slower than plain: 0.80 x with my-drafter; generate without it.'

    ```
    """
    how = "About as fast as plain"
    if gains(speed_up):
        how = "Faster than plain"
    elif speed_up < 1 - LEAST_GAIN:
        how = "Slower than plain"
    sentence = f"{how}: {speed_up:.2f} x with {who}"
    if counted:
        sentence += f", {counted}"
    if not gains(speed_up):
        sentence += f"; {way_out}"
    return f"{sentence}."


def slower_in(speed_ups: list[float]) -> str:
    """Count the prompts that were slower than plain generation, by the speed-up of each."""
    return f"slower than plain in {sum(ratio < 1 for ratio in speed_ups)} of {len(speed_ups)} prompts"
