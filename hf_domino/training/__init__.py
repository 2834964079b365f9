"""Training of drafters: the trainer, its arguments, rows to train on, and acceptance walked over known text."""

from typing import TYPE_CHECKING

from hf_domino.late import late

if TYPE_CHECKING:
    from hf_domino.training.acceptance import walk_acceptance
    from hf_domino.training.arguments import DominoTrainingArguments
    from hf_domino.training.data import RowDataset, load_rows
    from hf_domino.training.on_policy import generate_on_policy
    from hf_domino.training.trainer import DominoTrainer

__all__ = [
    "DominoTrainer",
    "DominoTrainingArguments",
    "RowDataset",
    "generate_on_policy",
    "load_rows",
    "walk_acceptance",
]

# Public name -> module it is loaded from.
_LATER = {
    "walk_acceptance": "acceptance",
    "DominoTrainingArguments": "arguments",
    "RowDataset": "data",
    "load_rows": "data",
    "generate_on_policy": "on_policy",
    "DominoTrainer": "trainer",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)
