"""What the workshop's command can do."""

from __future__ import annotations

from collections.abc import Sequence

from hf_domino.cli.main import main as run_one_of

PROGRAM = "python model_cards/workshop"
COMMANDS = {
    "recipe": (
        "recipes.command",
        "Make a pair from nothing: the bundled one, or a drafter for SmolLM2, Gemma 3 or Qwen2.5-Coder.",
    ),
    "study": ("study.command", "Train Domino, the DFlash baseline and variants, and show what makes a difference."),
    "figures": ("figures", "Draw the rows of a benchmark."),
    "tables": ("tables", "Write what pages say of measurements from the committed rows."),
    "ways": ("ways", "Draw the flowchart and the speeds of the page that decides which way is fastest."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of them; arguments and exit codes are as those of `hf-domino`."""
    return run_one_of(arguments, COMMANDS, PROGRAM)
