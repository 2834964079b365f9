"""Draft vocabularies in files: `d2t`, which maps columns to the target's ids, and what is exported for other projects.

Column i is the token with id i + d2t[i], and ids ascend, as in the releases of EAGLE-3, SpecForge and speculators. Some
of these also store `t2d`, which says for each of the target's tokens whether it is drafted. speculators also stores the
drafted rows of lm_head, which engines do not take from the target (its `DraftVocabMixin`, and `load_weights` of vLLM's
`qwen3_dflash.py`).

SpecForge's layout has no draft vocabulary for Domino and DFlash: its W2 covers all tokens. In such an export, the rows
of tokens that are not drafted are the mean of those that are. Whatever training added to all drafted rows alike changes
no distribution, but a token without it would win against all tokens that have it. Only `t2d` is stored beside the
tensors. Engines ignore it, but with it the exported drafter can be read back, and our plugin for vLLM can serve it.

Shapes: V tokens of the target, D of the draft vocabulary, H hidden size, R low rank.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.source import AGAIN, StoredTensor
from hf_domino.targets.compatibility import check_target
from hf_domino.targets.view import TargetModel

Tensors = dict[str, torch.Tensor]
# Tensors that describe the draft vocabulary.
D2T = "d2t"
T2D = "t2d"
SPREAD = (
    "The layout has no draft vocabulary. hf_domino's plugin for vLLM reads t2d; in other engines the drafter proposes "
    "all {} tokens instead of {}"
)
UNLEARNED = ", and W2 has the mean of their rows for the others"
NO_HEAD = (
    "Engines want the draft vocabulary's rows of the target's lm_head beside d2t: export with target=target "
    "(--target), or they cannot load the folder."
)


def ids_of(d2t: torch.Tensor) -> torch.Tensor:
    """Return the target's ids that a stored map describes."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def t2d_of(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return a mask of the target's tokens `[V]` that is true for these ids."""
    return torch.zeros(vocab_size, dtype=torch.bool, device=token_ids.device).index_fill(0, token_ids, True)


def d2t_of(token_ids: Sequence[int] | torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Create the map to store for some of the target's tokens, given in any order and each only once.

    Example:
    ```python
    >>> from hf_domino.formats.draft_vocabulary import d2t_of
    >>> d2t_of([7, 0, 3], vocab_size=10)
    tensor([0, 2, 5])

    ```
    """
    given = torch.as_tensor(token_ids)
    if given.dim() != 1 or given.is_floating_point():
        remedy = "For the most frequent ones, most_frequent(count_tokens(rows, vocab_size), size) of hf_domino.data."
        raise invalid_argument("token_ids", "a list of integers", token_ids, remedy)
    ids = given.to(torch.int64).cpu().sort().values
    found = ids - torch.arange(len(ids))
    check_d2t(found, vocab_size, "token_ids", "Give each token of the draft vocabulary once.")
    return found


def check_d2t(d2t: torch.Tensor, vocab_size: int, field: str = "the checkpoint's d2t", remedy: str = AGAIN) -> None:
    """Raise an error if a map is empty, or if its ids do not ascend or are not the target's."""
    if not len(d2t) or d2t.dtype not in (torch.int32, torch.int64):
        raise invalid_argument(field, "at least one integer", f"{len(d2t)} of {d2t.dtype}", remedy)
    ids = ids_of(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        value = f"ids from {int(ids.min())} to {int(ids.max())}"
        raise invalid_argument(field, f"of ids in [0, {vocab_size - 1}] (vocab_size={vocab_size})", value, remedy)
    if len(wrong := (ids.diff() <= 0).nonzero()):
        first = int(wrong[0])
        raise invalid_argument(field, "of ascending ids, none twice", ids[first : first + 2].tolist(), remedy)


def spread(tensors: Tensors, config: DominoConfig) -> tuple[Tensors, str]:
    """Return tensors for all tokens, with `t2d` in place of `d2t` and a whole W2, and a sentence about them."""
    found = dict(tensors)
    ids = ids_of(found.pop(D2T))
    found[T2D] = t2d_of(ids, config.vocab_size)
    note = SPREAD.format(config.vocab_size, len(ids))
    whole = copy.copy(config)
    whole.draft_vocab_size = None
    for name, shape in whole.shapes().items():
        if (rows := found[name]).shape != shape:
            note += UNLEARNED
            found[name] = rows.mean(dim=0).repeat(config.vocab_size, 1).index_copy(0, ids, rows)
    return found, f"{note}."


def read_draft_vocabulary(stored: Mapping[str, StoredTensor], config: DominoConfig) -> torch.Tensor | None:
    """Validate a stored draft vocabulary, and set its size in a configuration that does not state it.

    Returns the ids `[D]` if only `t2d` is stored, as by [`spread`], so that W2 covers all tokens; else None.
    """
    d2t, t2d = (stored[name].read().flatten() if name in stored else None for name in (D2T, T2D))
    if d2t is None:
        if t2d is None or config.draft_vocab_size:
            return None
        return drafted_ids(t2d, config.vocab_size)
    if config.draft_vocab_size is None:
        if len(d2t) == config.vocab_size:  # all tokens are drafted
            return None
        config.draft_vocab_size = len(d2t)
        config.check()
    check_d2t(d2t, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids_of(d2t)):
        raise invalid_argument(f"the checkpoint's {T2D}", f"true for the tokens of {D2T} alone", "others", AGAIN)
    return None


def drafted_ids(t2d: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the ids of the tokens that a stored `t2d` marks."""
    if t2d.shape != (vocab_size,) or t2d.is_floating_point() or not t2d.any():
        expected = f"a truth value for each of {vocab_size} tokens (vocab_size), one of them true"
        raise invalid_argument(f"the checkpoint's {T2D}", expected, f"{tuple(t2d.shape)} of {t2d.dtype}", AGAIN)
    return t2d.nonzero().flatten()


def beside(tensors: Tensors, config: DominoConfig, target: PreTrainedModel | None = None) -> tuple[Tensors, str | None]:
    """Add `t2d` to tensors, and the drafted rows of the target's lm_head; without a target, a warning instead."""
    ids = ids_of(tensors[D2T])
    found = tensors | {T2D: t2d_of(ids, config.vocab_size)}
    if target is None:
        return found, NO_HEAD
    check_target(config, target)
    head = TargetModel(target).readable_head
    if head is None:
        remedy = "Load it without quantisation, adapters and offloading."
        raise invalid_argument("the target's lm_head", "one whose rows can be read", type(target).__name__, remedy)
    return found | {"lm_head.weight": head.weight.detach()[ids.to(head.weight.device)]}, None
