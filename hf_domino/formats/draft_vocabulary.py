"""What becomes of a draft vocabulary where a drafter is written for others.

speculators stores `d2t` and `t2d`, and rows of lm_head that engines do not take from the target (its `DraftVocabMixin`,
and `load_weights` of vLLM's `qwen3_dflash.py`). The layout of SpecForge has no such thing for Domino and DFlash: there
W2 is of all tokens. Rows of tokens that are not drafted are the mean of those that are: what training gave to all of
them alike changes no law, and a token without it would win against all that have it.

Shapes: V tokens of the target, D of the draft vocabulary, H hidden size, R low rank.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.formats.d2t import D2T, W2, ids_of
from hf_domino.target.compatibility import check_target
from hf_domino.target.view import TargetModel

Tensors = dict[str, torch.Tensor]
SPREAD = "The layout has no draft vocabulary: there the drafter proposes all {} tokens instead of {}"
UNLEARNED = ", and W2 has the mean of their rows for the others"
NO_HEAD = (
    "Engines want the draft vocabulary's rows of the target's lm_head beside d2t: export with target=target "
    "(--target), or they cannot load the folder."
)


def spread(tensors: Tensors, config: DominoConfig) -> tuple[Tensors, str]:
    """Tensors of all tokens: W2 `[V, R]` with the mean of its rows for tokens that are not drafted.

    Args:
        tensors (`dict`): A drafter's, with `d2t` `[D]` and perhaps W2 `[D, R]`.
        config (`DominoConfig`): Its configuration.

    Returns:
        `tuple`: The tensors, and a sentence about them.
    """
    found = dict(tensors)
    ids = ids_of(found.pop(D2T))
    note = SPREAD.format(config.vocab_size, len(ids))
    if W2 in found:
        note += UNLEARNED
        rows = found[W2]
        mean = rows.float().mean(dim=0).to(rows.dtype)
        found[W2] = mean.repeat(config.vocab_size, 1).index_copy(0, ids, rows)
    return found, f"{note}."


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
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
    found = tensors | {"t2d": t2d}
    if target is None:
        return found, NO_HEAD
    check_target(config, target)
    head = TargetModel(target, config).readable_head
    if head is None:
        remedy = "Load it without quantisation, adapters and offloading."
        raise refusal("the target's lm_head", "one whose rows can be read", type(target).__name__, remedy)
    return found | {"lm_head.weight": head.weight.detach()[ids.to(head.weight.device)]}, None
