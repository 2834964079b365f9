"""What becomes of a draft vocabulary where a drafter is written for others.

speculators stores `d2t` and `t2d`, and rows of lm_head that engines do not take from the target (its `DraftVocabMixin`,
and `load_weights` of vLLM's `qwen3_dflash.py`). The layout of SpecForge has no such thing for Domino and DFlash: there
W2 is of all tokens. Rows of tokens that are not drafted are the mean of those that are: what training gave to all of
them alike changes no law, and a token without it would win against all that have it. `t2d` alone is stored beside it,
which engines pass over, so that the drafter that was exported can be read back, and served by our plugin for vLLM.

Shapes: V tokens of the target, D of the draft vocabulary, H hidden size, R low rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.formats.d2t import D2T, T2D, W2, check_d2t, ids_of, t2d_of
from hf_domino.formats.stored import AGAIN, StoredTensor
from hf_domino.target.compatibility import check_target
from hf_domino.target.view import TargetModel

Tensors = dict[str, torch.Tensor]
SPREAD = (
    "The layout has no draft vocabulary. hf_domino's plugin for vLLM reads t2d; in other engines the drafter proposes "
    "all {} tokens instead of {}"
)
UNLEARNED = ", and W2 has the mean of their rows for the others"
NO_HEAD = (
    "Engines want the draft vocabulary's rows of the target's lm_head beside d2t: export with target=target "
    "(--target), or they cannot load the folder."
)


def spread(tensors: Tensors, config: DominoConfig) -> tuple[Tensors, str]:
    """Tensors of all tokens: W2 `[V, R]` with the mean of its rows for tokens that are not drafted, and `t2d` `[V]`.

    Args:
        tensors (`dict`): A drafter's, with `d2t` `[D]` and perhaps W2 `[D, R]`.
        config (`DominoConfig`): Its configuration.

    Returns:
        `tuple`: The tensors, and a sentence about them.
    """
    found = dict(tensors)
    ids = ids_of(found.pop(D2T))
    found[T2D] = t2d_of(ids, config.vocab_size)
    note = SPREAD.format(config.vocab_size, len(ids))
    if W2 in found:
        note += UNLEARNED
        rows = found[W2]
        found[W2] = rows.mean(dim=0).repeat(config.vocab_size, 1).index_copy(0, ids, rows)
    return found, f"{note}."


def untold(stored: Mapping[str, StoredTensor], config: DominoConfig) -> torch.Tensor | None:
    """Read and check a draft vocabulary that is stored, of which the configuration may say nothing.

    Args:
        stored (`Mapping`): What a checkpoint's files hold.
        config (`DominoConfig`): Its configuration; `draft_vocab_size` is set where there is `d2t` of fewer tokens.

    Returns:
        `torch.Tensor`: The ids `[D]` where there is `t2d` alone, as of [`spread`], and W2 is of all tokens; else None.

    Raises:
        ValueError: If `d2t` is longer than the vocabulary or no such map, or `t2d` contradicts it or does not say of
            each token whether it is drafted.
    """
    d2t, t2d = (stored[name].read().flatten() if name in stored else None for name in (D2T, T2D))
    if d2t is None:
        return None if t2d is None or config.draft_vocab_size else drafted_ids(t2d, config.vocab_size)
    if config.draft_vocab_size is None:
        if len(d2t) == config.vocab_size:  # no map at all
            return None
        config.draft_vocab_size = len(d2t)
        config.check()
    check_d2t(d2t, config.vocab_size)
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids_of(d2t)):
        raise refusal(f"the checkpoint's {T2D}", f"true for the tokens of {D2T} alone", "others", AGAIN)
    return None


def drafted_ids(t2d: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The ids `[D]` of the tokens of which a stored `t2d` `[V]` says that they are drafted.

    Args:
        t2d (`torch.Tensor`): As a checkpoint holds it.
        vocab_size (`int`): Tokens of the target (V).

    Raises:
        ValueError: If it does not say of each token whether it is drafted.
    """
    if t2d.shape != (vocab_size,) or t2d.is_floating_point() or not t2d.any():
        expected = f"a truth value for each of {vocab_size} tokens (vocab_size), one of them true"
        raise refusal(f"the checkpoint's {T2D}", expected, f"{tuple(t2d.shape)} of {t2d.dtype}", AGAIN)
    return t2d.nonzero().flatten()


def beside(tensors: Tensors, config: DominoConfig, target: PreTrainedModel | None = None) -> tuple[Tensors, str | None]:
    """Tensors with `t2d` `[V]` bool, which says of each token whether it is drafted, and with rows of lm_head.

    Args:
        tensors (`dict`): A drafter's, with `d2t` `[D]`.
        config (`DominoConfig`): Its configuration.
        target (`PreTrainedModel`, *optional*): Its target; `lm_head.weight` `[D, H]` is stored if it is given.

    Returns:
        `tuple`: The tensors, and a sentence about what is missing, or None.

    Raises:
        ValueError: If the target is another one, or its lm_head cannot be read.
    """
    ids = ids_of(tensors[D2T])
    found = tensors | {T2D: t2d_of(ids, config.vocab_size)}
    if target is None:
        return found, NO_HEAD
    check_target(config, target)
    head = TargetModel(target, config).readable_head
    if head is None:
        remedy = "Load it without quantisation, adapters and offloading."
        raise refusal("the target's lm_head", "one whose rows can be read", type(target).__name__, remedy)
    return found | {"lm_head.weight": head.weight.detach()[ids.to(head.weight.device)]}, None
