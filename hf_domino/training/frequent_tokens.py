"""The draft vocabulary of a new drafter: the tokens that its training text says most often."""

from __future__ import annotations

from typing import Any

from accelerate.utils import broadcast_object_list

from hf_domino._common.notices import notice
from hf_domino.data.rows import count_tokens, most_frequent
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.formats.draft_vocabulary import d2t_of
from hf_domino.training.arguments import DominoTrainingArguments

FIRST_TOKENS = (
    "The drafter proposes the first {0} tokens of the vocabulary, as nobody chose others: `hf-domino train` takes the "
    "most frequent ones of its text; in Python, most_frequent(count_tokens(rows, vocab_size), {0}) of hf_domino.data "
    "and DominoDraftModel.restricted do."
)


def say_first_tokens(drafter: DominoDraftModel) -> None:
    """Say that nobody chose which tokens are drafted, where that is so."""
    if drafter.config.draft_vocab_size is not None and not drafter.d2t.any():
        notice(FIRST_TOKENS.format(drafter.config.draft_vocab_size))


def take_frequent_tokens(drafter: DominoDraftModel, rows: Any, args: DominoTrainingArguments) -> None:
    """Let a new drafter propose the most frequent tokens with loss of its text, counted by the first process."""
    size, vocab_size = drafter.config.draft_vocab_size, drafter.config.vocab_size
    if size is None:
        return
    found: list[Any] = [None]
    if args.process_index == 0:
        counts = count_tokens((rows[index] for index in range(len(rows))), vocab_size)
        found = [most_frequent(counts, size)]
        share = counts[found[0]].sum() / max(counts.sum(), 1)
        said = f"{share:.2%} of what the training text says, which says {int((counts > 0).sum())} of them"
        notice(f"the draft vocabulary: {size} of {vocab_size} tokens, {said}.")
    broadcast_object_list(found)
    drafter.d2t.copy_(d2t_of(found[0], vocab_size))
