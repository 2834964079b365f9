"""A drafter of fewer tokens, made from one of more: one training can be measured at several draft vocabularies."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from hf_domino._common.refusal import refusal
from hf_domino.formats.draft_vocabulary import D2T, OF_DRAFTED, d2t_of, ids_of
from hf_domino.formats.exporting import own_tensors


def restrict(drafter: Any, token_ids: Sequence[int] | torch.Tensor, name: str = "") -> Any:
    """A copy of a drafter that proposes some of its tokens only.

    Args:
        drafter (`DominoDraftModel`): The drafter, which stays as it is.
        token_ids (`Sequence[int]` or `torch.Tensor`): The target's ids, in any order.
        name (`str`, *optional*): The folder or Hub name it is loaded from again; none where it is stored nowhere, and
            no adapter could name it.

    Raises:
        ValueError: If an id is there twice or not among those that the drafter proposes, or if tensors are not the
            drafter's own (adapters, quantised weights).
    """
    config, tensors = deepcopy(drafter.config), own_tensors(drafter)
    d2t = d2t_of(token_ids, config.vocab_size)
    ids = ids_of(d2t)
    columns = drafter.vocabulary.columns(ids.to(drafter.device))
    if len(others := ids[columns.cpu() < 0]):
        remedy = "Restrict the drafter that this one was made from."
        raise refusal("token_ids", "among the tokens that the drafter proposes", int(others[0]), remedy)
    config.name_or_path, config._commit_hash = name, None
    config.draft_vocab_size = None if len(d2t) == config.vocab_size else len(d2t)
    chosen = {name: tensor.detach().clone() for name, tensor in tensors.items() if name not in (D2T, *OF_DRAFTED)}
    for name in OF_DRAFTED:
        if name in tensors:
            chosen[name] = tensors[name].detach().index_select(0, columns)
    if config.draft_vocab_size is not None:
        chosen[D2T] = d2t.to(drafter.device)
    with torch.device("meta"):
        result = type(drafter)(config)
    result.load_state_dict(chosen, assign=True)
    return result.train(drafter.training)
