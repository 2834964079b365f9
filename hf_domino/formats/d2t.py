"""`d2t`, the stored map from the columns of a draft vocabulary to the target's ids.

The id of column i is i + d2t[i], and ids ascend: as in the releases of EAGLE-3, SpecForge and speculators, of which
some store `t2d` beside it, which says of each of the target's tokens whether it is drafted.

Shapes: V tokens of the target, D of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_domino._common.refusal import refusal

D2T, T2D, W2 = "d2t", "t2d", "embed_proj.2.weight"  # tensors that are of the draft vocabulary
OF_DRAFTED = (W2, "lm_head.weight")  # those with a row for each of its tokens, where they are the drafter's
_AGAIN = "Save the drafter again, or download it again."


def ids_of(d2t: torch.Tensor) -> torch.Tensor:
    """The target's ids `[D]` of a stored map `[D]`."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def t2d_of(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Of each of the target's tokens whether it is among these ids `[D]`: `[V]` bool."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device).index_fill(0, token_ids, True)


def d2t_of(token_ids: Sequence[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The stored map `[D]` int64 of some of the target's tokens.

    Args:
        token_ids (`Sequence[int]` or `torch.Tensor`): Ids in any order, none twice.
        vocab_size (`int`): Tokens of the target (V).

    Raises:
        ValueError: If they are no list of integers, there are none, or one is there twice or is not in
            `[0, vocab_size)`.

    Example:
    ```python
    >>> from hf_domino.formats.d2t import d2t_of
    >>> d2t_of([7, 0, 3], vocab_size=10)
    tensor([0, 2, 5])

    ```
    """
    given = torch.as_tensor(token_ids)
    if given.dim() != 1 or given.is_floating_point():
        remedy = "For the most frequent ones, most_frequent(count_tokens(rows, vocab_size), size) of hf_domino.data."
        raise refusal("token_ids", "a list of integers", token_ids, remedy)
    ids = given.to(torch.int64).cpu().sort().values
    found = ids - torch.arange(len(ids))
    check_d2t(found, vocab_size, "token_ids", "Give each token of the draft vocabulary once.")
    return found


def check_d2t(d2t: torch.Tensor, vocab_size: int, field: str = "the checkpoint's d2t", remedy: str = _AGAIN) -> None:
    """Refuse a map whose ids do not ascend, or are not the target's.

    Args:
        d2t (`torch.Tensor`): `[D]`.
        vocab_size (`int`): Tokens of the target (V).
        field (`str`, *optional*): What it was given as.
        remedy (`str`, *optional*): The way out.

    Raises:
        ValueError: If it is such a map, or empty.
    """
    if not len(d2t) or d2t.dtype not in (torch.int32, torch.int64):
        raise refusal(field, "at least one integer", f"{len(d2t)} of {d2t.dtype}", remedy)
    ids = ids_of(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        value = f"ids from {int(ids.min())} to {int(ids.max())}"
        raise refusal(field, f"of ids in [0, {vocab_size - 1}] (vocab_size={vocab_size})", value, remedy)
    if len(wrong := (ids.diff() <= 0).nonzero()):
        first = int(wrong[0])
        raise refusal(field, "of ascending ids, none twice", ids[first : first + 2].tolist(), remedy)
