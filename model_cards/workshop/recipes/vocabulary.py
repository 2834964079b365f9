"""Another draft vocabulary for a drafter that is trained further."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_domino.formats.draft_vocabulary import D2T, d2t_of, ids_of
from hf_domino.formats.exporting import own_tensors
from hf_domino.methods import DominoDraftModel


def with_tokens(drafter: DominoDraftModel, token_ids: Sequence[int]) -> DominoDraftModel:
    """Return a copy of a drafter that proposes these tokens, some of which it did not propose before.

    In its correction head, new tokens get the mean of the rows of all others: what training added to all rows alike
    changes no distribution, so without it new tokens would win or lose against all others.
    """
    config = drafter.config.changed(draft_vocab_size=len(token_ids))
    tensors = {name: tensor.detach().clone() for name, tensor in own_tensors(drafter).items()}
    tensors[D2T] = d2t_of(token_ids, config.vocab_size)
    columns = drafter.vocabulary.columns(ids_of(tensors[D2T]).to(drafter.device))
    for name, shape in config.shapes().items():
        found = tensors[name]
        if found.shape != torch.Size(shape):
            chosen = found[columns.clamp(min=0)]
            chosen[columns < 0] = found.mean(dim=0)
            tensors[name] = chosen
    result = DominoDraftModel(config)
    result.load_state_dict(tensors)
    return result
