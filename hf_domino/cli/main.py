"""The `hf-domino` command: one subcommand per task, each imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hf_domino.cli.exits import INTERRUPTED, USER_ERROR

# name -> (module with `add_arguments(parser)` and `run(options) -> int | None`, one line of help)
COMMANDS = {
    "demo": ("hf_domino.cli.demo", "Generate with the bundled pair, plain and assisted, and show the rounds."),
    "check": ("hf_domino.cli.check", "Say whether a drafter fits its target, and if not, why."),
    "train": ("hf_domino.cli.train", "Train a drafter for a target, from one YAML file or flags."),
    "bench": ("hf_domino.cli.bench", "Measure every way to generate on your model, in one process."),
    "plan": (
        "hf_domino.cli.plan",
        "Say whether speculation pays, how many proposals are best, and over which network.",
    ),
    "bench-round": ("hf_domino.cli.bench_round", "Measure one round with random weights: graphed, launched, growing."),
    "recipe": ("hf_domino.cli.recipe", "Make the bundled pair from nothing."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line without the program's name, defaults to `sys.argv[1:]`.

    Returns:
        `int`: 0, or 1 where a check failed (outputs differ, a drafter does not fit), 2 where the input is wrong, 130 on
        an interrupt, 143 where SIGTERM ended a training early.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = build_parser(arguments).parse_args(arguments)
    try:
        return importlib.import_module(COMMANDS[options.command][0]).run(options) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError) as error:
        if options.traceback:
            raise
        print(f"hf-domino {options.command}: {error}", file=sys.stderr)
        return USER_ERROR


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser, with the flags of the one subcommand that `arguments` call for.

    Args:
        arguments (`Sequence[str]`): Command line without the program's name.
    """
    parser = argparse.ArgumentParser(
        prog="hf-domino", description="Domino speculative decoding for Hugging Face Transformers."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary, formatter_class=_HelpFormatter)
        subparser.add_argument("--traceback", action="store_true", help="show where an error came from")
        if arguments and arguments[0] == name:
            importlib.import_module(module).add_arguments(subparser)
    return parser


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something: not those of switches, nor None."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False
        return action.help if silent else super()._get_help_string(action)
