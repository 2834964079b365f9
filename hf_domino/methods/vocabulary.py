"""Draft vocabularies: the tokens that a drafter can propose, either all of the target's or only the frequent ones.

Most text consists of a language model's frequent tokens. A token that is never proposed costs acceptance where it
occurs, but never exactness. So base logits, W2 and the draft distribution can be limited to the D most frequent tokens,
as in FR-Spec (arXiv 2502.14856). Columns number these tokens by ascending id. A token id always is the target's.

Shapes: V tokens of the target, D tokens of the draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hf_domino._common.errors import invalid_argument
from hf_domino.formats.draft_vocabulary import D2T, check_d2t, d2t_of, ids_of
from hf_domino.formats.exporting import own_tensors
from hf_domino.targets.packed import linear
from hf_domino.targets.view import TargetModel


class DraftVocabulary:
    """All tokens of the target; their columns are their ids."""

    is_reduced = False

    def of_target(self, target: TargetModel) -> DraftVocabulary:
        """Return the vocabulary for a target, which can have another number of tokens than the drafter was made for."""
        return self

    def total(self, num_columns: int) -> int:
        """The number of the target's tokens (V), given the number of columns (D)."""
        return num_columns

    def logits(self, target: TargetModel, hidden_states: torch.Tensor, scaling: Any = None) -> torch.Tensor:
        """Compute the target's logits `[..., D]` of these tokens in fp32 from final hidden states `[..., H]`."""
        return target.logits(hidden_states, scaling=scaling)

    def prepare(self, target: TargetModel) -> int | None:
        """Update the cached rows of the target's lm_head, once per call; returns their address for captured graphs."""
        return None

    def weights(self, target: TargetModel) -> tuple[torch.Tensor, ...]:
        """The cached rows of the target's lm_head, `[D, H]`, if logits are computed with them."""
        return ()

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        """Return the target's ids `[...]` of columns `[...]`."""
        return columns

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the columns `[...]` of ids `[...]`; -1 for tokens outside this vocabulary."""
        return ids

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Select the values `[..., D]` of these tokens from values `[..., V]` of all tokens, such as noise."""
        return values

    def scatter(self, scores: torch.Tensor) -> torch.Tensor:
        """Spread logits or scores `[..., D]` over all tokens `[..., V]`; tokens outside this vocabulary get -inf."""
        return scores


class Rows(NamedTuple):
    """Rows of an lm_head `[D, H]`, their biases `[D]` if it has any, and a trace of the tensors they are copies of."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    source: tuple


# The rows of each lm_head, by the `d2t` of a drafter, which its views share. Neither key is kept alive.
_rows: WeakKeyDictionary[nn.Module, WeakIdKeyDictionary] = WeakKeyDictionary()


def rows_of(head: nn.Linear, d2t: torch.Tensor, is_sure: bool = True) -> Rows:
    """Return the rows of an lm_head for a `d2t` `[D]`; copy them again only if weights changed.

    Without `is_sure`, look at the weights, too: a write to `weight.data`, such as PEFT's merge, leaves no other trace.
    """
    of_head = _rows.setdefault(head, WeakIdKeyDictionary())
    found: Rows | None = of_head.get(d2t)
    source = tuple(_fingerprint(tensor) for tensor in (head.weight, head.bias, d2t))
    traced = found if found is not None and found.source == source else None
    if traced is not None and is_sure:
        return traced
    token_ids = ids_of(d2t).to(head.weight.device)
    if traced is not None and _are_rows(traced, head, token_ids):
        return traced
    with torch.inference_mode(False), torch.no_grad():  # training backpropagates through them
        weight = _copy_rows(head.weight, token_ids, found and found.weight)
        if head.bias is None:
            bias = None
        else:
            bias = _copy_rows(head.bias, token_ids, found and found.bias)
    made = of_head[d2t] = Rows(weight, bias, source)
    return made


@torch.no_grad()
def _are_rows(found: Rows, head: nn.Linear, token_ids: torch.Tensor) -> bool:
    """Return whether rows still equal those of an lm_head, by one weight of each row and by all biases."""
    places = torch.arange(len(token_ids), device=token_ids.device)
    columns = places % head.in_features  # a write to some rows or to some columns is seen, too
    if not torch.equal(found.weight[places, columns], head.weight[token_ids, columns]):
        return False
    return found.bias is None or torch.equal(found.bias, head.bias[token_ids])


def _copy_rows(tensor: torch.Tensor, token_ids: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """Copy rows, into the previous copy if dtype and device match, because captured graphs keep its address."""
    has_form = before is not None and (before.dtype, before.device) == (tensor.dtype, tensor.device)
    return torch.index_select(tensor, 0, token_ids, out=before if has_form else None)


def _fingerprint(tensor: torch.Tensor | None) -> tuple | None:
    """Return a value that changes when the tensor is moved or written to, unless the write bypasses autograd."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor.device, tensor.dtype, 0 if tensor.is_inference() else tensor._version


class ReducedVocabulary(DraftVocabulary):
    """Some of the target's tokens, given by the stored map `d2t` `[D]` int64: each token's id minus its column."""

    is_reduced = True

    def __init__(self, num_tokens: int, d2t: torch.Tensor):
        self._num_tokens = num_tokens
        self._d2t = d2t
        self._token_ids: torch.Tensor | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        """The target's ids of all columns, `[D]` int64."""
        if self._token_ids is None:  # not a `cached_property`, which takes a lock that cannot be compiled
            self._token_ids = ids_of(self._d2t)
        return self._token_ids

    def of_target(self, target: TargetModel) -> DraftVocabulary:
        return ReducedVocabulary(target.text_config.vocab_size, self._d2t)

    def total(self, num_columns: int) -> int:
        return self._num_tokens

    def logits(self, target: TargetModel, hidden_states: torch.Tensor, scaling: Any = None) -> torch.Tensor:
        """Multiply only by the rows of these tokens; if lm_head cannot be read, call it and select the columns."""
        head = target.readable_head
        if head is None:
            return self.gather(target.logits(hidden_states, scaling=scaling))
        if not torch.compiler.is_compiling():
            weight, bias, _ = rows_of(head, self._d2t)
        else:  # compiled code cannot look up the cached rows
            weight, bias = (None if part is None else part[self.token_ids] for part in (head.weight, head.bias))
        return target.logits(hidden_states, partial(linear, weight=weight, bias=bias), scaling)

    def prepare(self, target: TargetModel) -> int | None:
        check_d2t(self._d2t, target.text_config.vocab_size, "the drafter's d2t")
        head = target.readable_head
        if head is None:
            return None
        return rows_of(head, self._d2t, is_sure=False).weight.data_ptr()

    def weights(self, target: TargetModel) -> tuple[torch.Tensor, ...]:
        head = target.readable_head
        if head is None:
            return ()
        return (rows_of(head, self._d2t).weight,)

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        return self.token_ids.to(columns.device)[columns]

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        token_ids = self.token_ids.to(ids.device)
        nearest = torch.searchsorted(token_ids, ids.contiguous()).clamp_max(len(token_ids) - 1)
        return torch.where(token_ids[nearest] == ids, nearest, -1)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values.index_select(-1, self.token_ids.to(values.device))

    def scatter(self, scores: torch.Tensor) -> torch.Tensor:
        all_scores = scores.new_full((*scores.shape[:-1], self._num_tokens), -torch.inf)
        return all_scores.index_copy_(-1, self.token_ids.to(scores.device), scores)


def restrict(drafter: Any, token_ids: Sequence[int] | torch.Tensor, name: str = "") -> Any:
    """Return a copy of a drafter that proposes only some of its tokens.

    Args:
        drafter ([`DominoDraftModel`]): The drafter, which stays as it is.
        token_ids (`Sequence[int]` or `torch.Tensor`): Ids of the target's tokens, in any order.
        name (`str`, *optional*, defaults to `""`): Folder or Hub name that the copy can be loaded from again, if any.
    """
    config = deepcopy(drafter.config)
    tensors = own_tensors(drafter)
    d2t = d2t_of(token_ids, config.vocab_size)
    ids = ids_of(d2t)
    columns = drafter.vocabulary.columns(ids.to(drafter.device))
    if len(others := ids[columns.cpu() < 0]):
        remedy = "Restrict the drafter that this one was made from."
        raise invalid_argument("token_ids", "among the tokens that the drafter proposes", int(others[0]), remedy)
    config.name_or_path = name
    config._commit_hash = None
    if len(d2t) == config.vocab_size:
        config.draft_vocab_size = None
    else:
        config.draft_vocab_size = len(d2t)
    tensors[D2T] = d2t.to(drafter.device)
    chosen = dict[str, torch.Tensor]()
    for name, shape in config.shapes().items():
        tensor = tensors[name].detach()
        chosen[name] = tensor.clone() if tensor.shape == shape else tensor.index_select(0, columns)
    with torch.device("meta"):
        result = type(drafter)(config)
    result.load_state_dict(chosen, assign=True)
    return result.train(drafter.training)
