"""Train drafters: the trainer, its arguments and its module, and acceptance lengths simulated over existing text."""

from typing import TYPE_CHECKING

from hf_domino._common.late import late

if TYPE_CHECKING:
    from hf_domino.training.arguments import DominoTrainingArguments
    from hf_domino.training.drafter_training import DrafterTraining
    from hf_domino.training.evidence.acceptance import simulate_acceptance
    from hf_domino.training.evidence.record import Run
    from hf_domino.training.hidden_states.folder import CachedRows
    from hf_domino.training.hidden_states.writing import StateWriter
    from hf_domino.training.trainer import DominoTrainer

__all__ = [
    "CachedRows",
    "DominoTrainer",
    "DominoTrainingArguments",
    "DrafterTraining",
    "Run",
    "StateWriter",
    "simulate_acceptance",
]

# Public name -> module from which it is loaded.
_LATER = {
    "simulate_acceptance": "evidence.acceptance",
    "DominoTrainingArguments": "arguments",
    "DrafterTraining": "drafter_training",
    "CachedRows": "hidden_states.folder",
    "StateWriter": "hidden_states.writing",
    "DominoTrainer": "trainer",
    "Run": "evidence.record",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)
