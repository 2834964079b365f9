"""Gumbel noise of a counter-based generator, the same numbers in PyTorch and in Triton.

Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") maps a counter and a key to four words
of 32 random bits. The counter is (column, row, offset), the key is the seed, so that a call draws its noise without any
state on the host and a captured CUDA graph draws fresh noise when its offset was raised on the device.

Shapes: B rows, N columns.
"""

from __future__ import annotations

import torch

ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
UNIFORM_STEP = 2.0**-31  # 31 bits: fp32 holds the small ones exactly, and those decide
UNIFORM_MAX = 1.0 - 2.0**-24  # the largest fp32 below 1


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32.

    Args:
        counter (`tuple[torch.Tensor, ...]`): Four int64 tensors of 32-bit words that broadcast together.
        key (`tuple[torch.Tensor, ...]`): Two of them.

    Returns:
        `tuple[torch.Tensor, ...]`: Four words, as int64.

    Example:
    ```python
    >>> import torch
    >>> from domino_kernels.noise import philox
    >>> zero = torch.tensor(0)
    >>> [f"{word.item():08x}" for word in philox((zero,) * 4, (zero,) * 2)]  # a published test vector
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']

    ```
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a product of 32-bit words; in halves, because int64 has no room for its top bit."""
    low_part, high_part = word * (factor & 0xFFFF), word * (factor >> 16)
    middle = high_part + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)


def gumbel(random_state: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Standard Gumbel noise: argmax(log p + noise) is a draw from p.

    -log(E) with E = -log(1 - u) exponential. Small E decide a race, and `log1p` keeps them apart down to 2^-32, where
    -log(u) of a u just below 1 would know only multiples of 2^-24.

    Args:
        random_state (`torch.Tensor`): Seed and offset, int64 `[2]`.
        num_rows (`int`): Rows (B).
        num_columns (`int`): Columns (N).

    Returns:
        `torch.Tensor`: fp32 `[B, N]`.
    """
    seed, offset = random_state
    columns = torch.arange(num_columns, device=random_state.device)
    rows = torch.arange(num_rows, device=random_state.device)[:, None]
    words = philox((columns, rows, *_words(offset)), _words(seed))
    uniform = ((words[0] >> 1).float() + 0.5) * UNIFORM_STEP
    return -torch.log(-torch.log1p(-uniform.clamp(max=UNIFORM_MAX)))


def _words(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return value & _WORD, (value >> 32) & _WORD
