"""Training of drafters: the trainer, its arguments, rows to train on, and acceptance walked over known text."""

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
