"""The draft vocabulary of a new drafter: the tokens that its training text says most often."""

from __future__ import annotations

from typing import Any

from accelerate.utils import broadcast_object_list

from hf_domino._common.notices import notice
from hf_domino.data.frequencies import count_tokens, most_frequent
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.formats.draft_vocabulary import d2t_of
from hf_domino.training.arguments import DominoTrainingArguments


def take_frequent_tokens(drafter: DominoDraftModel, rows: Any, args: DominoTrainingArguments) -> None:
    """Let a new drafter propose the most frequent tokens of its training text; nothing without a draft vocabulary.

    Only tokens with loss are counted, by the first process, once for all.

    Args:
        drafter (`DominoDraftModel`): A new one, whose correction head has learned nothing yet; changed in place.
        rows (`RowDataset`): What it will be trained on.
        args (`DominoTrainingArguments`): For the processes.
    """
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
    if args.world_size > 1:
        broadcast_object_list(found)
    drafter.d2t.copy_(d2t_of(found[0], vocab_size))
