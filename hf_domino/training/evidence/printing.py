"""Print the metrics of a training that fit into a line of the terminal."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

# Metrics that fit into a line of the terminal; trainer_state.json has everything that is logged.
SHOWN = (
    *("train_runtime", "train_loss", "loss", "learning_rate", "lambda_base", "acceptance_length"),
    *("eval_loss", "eval_walked_acceptance_length", "epoch"),
)


def _shown(logs: dict[str, float]) -> dict[str, float]:
    return {name: logs[name] for name in SHOWN if name in logs} or logs


class ShortPrinter(PrinterCallback):
    """Prints only the metrics that fit into a line."""

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Print a log."""
        super().on_log(*args, logs=_shown(logs), **kwargs)


class ShortProgress(ProgressCallback):
    """Shows the progress bar, and prints only the metrics that fit into a line."""

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Print a log above the bar."""
        super().on_log(*args, logs=_shown(logs), **kwargs)


def print_less(trainer: Trainer) -> None:
    """Let a trainer print only the metrics that fit into a line, unless a callback of another class prints them."""
    for theirs, ours in ((PrinterCallback, ShortPrinter), (ProgressCallback, ShortProgress)):
        if any(type(callback) is theirs for callback in trainer.callback_handler.callbacks):
            trainer.remove_callback(theirs)
            trainer.add_callback(ours)
