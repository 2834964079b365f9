"""The tokens that drafts are chosen among: all of the target's, or the few of a draft vocabulary.

Text is mostly made of a language model's frequent tokens. A token that is never proposed costs acceptance where it
comes, not exactness, so base logits, W2 and the draft's law may be of the D most frequent ones alone: FR-Spec (arXiv
2502.14856). Columns count them by ascending ids; an id is the target's wherever it goes.

Shapes: V tokens of the target, D of the draft vocabulary, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from hf_domino.drafter.head_rows import HeadRows
from hf_domino.formats.draft_vocabulary import check_d2t, ids_of
from hf_domino.target.view import TargetModel


class DraftVocabulary:
    """All tokens of the target, whose columns are their ids."""

    is_reduced = False

    def total(self, num_columns: int) -> int:
        """All tokens of the target (V), where so many have columns (D)."""
        return num_columns

    def logits(self, target: TargetModel, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's logits `[..., D]` of these tokens in fp32, for final hidden states `[..., H]`."""
        return target.logits(hidden_states)

    def prepare(self, target: TargetModel) -> int | None:
        """Bring up to date what [`~DraftVocabulary.logits`] keeps of this target; its address, if it keeps something.

        Once a call, as it reads a result back. A captured graph reads that address.
        """
        return None

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        """The target's ids `[...]` of columns `[...]`."""
        return columns

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """The columns `[...]` of ids `[...]`; -1 for tokens that are not drafted."""
        return ids

    def all_ids(self, num_rows: int) -> torch.Tensor | None:
        """The ids of all columns for each of some rows, `[num_rows, D]`; None where they are the columns."""
        return None

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Of values `[..., V]` of all tokens, such as noise, those of these: `[..., D]`."""
        return values

    def scatter(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits or scores `[..., D]` among those of all tokens `[..., V]`, of which the others are forbidden."""
        return scores


class ReducedVocabulary(DraftVocabulary):
    """Some tokens of the target.

    Args:
        num_tokens (`int`): Tokens of the target (V).
        d2t (`torch.Tensor`): The id of each less its column, `[D]` int64; ids ascend.
        heads ([`HeadRows`]): Keeps the rows of lm_heads.
    """

    is_reduced = True

    def __init__(self, num_tokens: int, d2t: torch.Tensor, heads: HeadRows):
        self._num_tokens, self._d2t, self._heads = num_tokens, d2t, heads
        self._token_ids: torch.Tensor | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        """The target's ids `[D]` int64 of all columns."""
        if self._token_ids is None:  # `cached_property` takes a lock, which cannot be compiled
            self._token_ids = ids_of(self._d2t)
        return self._token_ids

    def total(self, num_columns: int) -> int:
        """See [`DraftVocabulary`]."""
        return self._num_tokens

    def logits(self, target: TargetModel, hidden_states: torch.Tensor) -> torch.Tensor:
        """By these rows of lm_head alone; by a call of it, and a choice of columns, where they cannot be read."""
        head = target.readable_head
        if head is None:
            return self.gather(target.logits(hidden_states))
        if torch.compiler.is_compiling():  # what is kept cannot be looked at there
            weight, bias = (None if part is None else part[self.token_ids] for part in (head.weight, head.bias))
            return target.logits(hidden_states, partial(F.linear, weight=weight, bias=bias))
        rows = self._heads.of(head, self._d2t)
        return target.logits(hidden_states, partial(F.linear, weight=rows.weight, bias=rows.bias))

    def prepare(self, target: TargetModel) -> int | None:
        """See [`DraftVocabulary`]."""
        check_d2t(self._d2t, self._num_tokens, "the drafter's d2t")
        head = target.readable_head
        return None if head is None else self._heads.of(head, self._d2t, compares=True).weight.data_ptr()

    def ids(self, columns: torch.Tensor) -> torch.Tensor:
        """See [`DraftVocabulary`]."""
        return self.token_ids.to(columns.device)[columns]

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """See [`DraftVocabulary`]."""
        token_ids = self.token_ids.to(ids.device)
        nearest = torch.searchsorted(token_ids, ids.contiguous()).clamp_max(len(token_ids) - 1)
        return torch.where(token_ids[nearest] == ids, nearest, -1)

    def all_ids(self, num_rows: int) -> torch.Tensor | None:
        """See [`DraftVocabulary`]."""
        return self.token_ids.expand(num_rows, -1)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """See [`DraftVocabulary`]."""
        return values.index_select(-1, self.token_ids.to(values.device))

    def scatter(self, scores: torch.Tensor) -> torch.Tensor:
        """See [`DraftVocabulary`]."""
        all_scores = scores.new_full((*scores.shape[:-1], self._num_tokens), -torch.inf)
        return all_scores.index_copy_(-1, self.token_ids.to(scores.device), scores)
