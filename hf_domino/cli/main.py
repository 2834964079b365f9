"""The `hf-domino` command has one subcommand per task, each of which is imported only when it is called.

A subcommand's module holds `EXAMPLES`, `add_arguments(parser)` and `run(options) -> int | None`. `run` does the slow
imports, so that help answers at once. If flags come from slow modules, there is also `add_help(parser)`, which replaces
`add_arguments` for `--help`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence

from hf_domino._common.version import __version__
from hf_domino._common.whole_files import why_no_room
from hf_domino.cli.exits import INTERRUPTED, USER_ERROR
from hf_domino.cli.flags import respell

# Name of a command, which is that of its module -> one line of help.
SUMMARIES = {
    "generate": "Answer one prompt with a target and its drafter, or compare with the target alone.",
    "chat": "Chat with a target and its drafter, and see each round.",
    "run": "Start a program in which every generate of the target uses a drafter.",
    "check": "Check whether a drafter fits its target, and if it does not, why.",
    "train": "Train a drafter for a target, with a YAML file, flags or both.",
    "data": "Let a target write the training text of its drafter.",
    "bench": "Measure how fast your model generates with each method.",
    "find": "List the drafters for a target on the Hub, and say which of them load.",
    "push": "Write a drafter's card, and publish its folder on the Hub.",
    "export": "Export a drafter for SGLang, vLLM and others.",
    "env": "Show versions and hardware, for a bug report.",
}
COMMANDS = {name: (f"hf_domino.cli.{name}", summary) for name, summary in SUMMARIES.items()}
HELP = {"-h", "--help"}
Commands = Mapping[str, tuple[str, str]]
# Loggers whose warnings a user can do nothing about: they concern torchao's kernels for other machines, torchao's calls
# of torch, and parameters that were placed on purpose.
CHATTER = ("torchao", "torch.utils._pytree", "accelerate.big_modeling")


def main(arguments: Sequence[str] | None = None, commands: Commands = COMMANDS, program: str = "hf-domino") -> int:
    """Run one subcommand.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line without the program's name, defaults to `sys.argv[1:]`.
        commands (`Mapping`, *optional*): Module and line of help of each command; defaults to those of `hf-domino`.
        program (`str`, *optional*): The program's name.

    Returns:
        `int`: 0, or 1 if a check failed (outputs differ, a drafter does not fit), 2 if the input is wrong, 3 if too
        little was measured to judge, 130 on an interrupt, 143 if SIGTERM ended a training early.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT's use of Transformers
    for name in CHATTER:
        logging.getLogger(name).setLevel(logging.ERROR)
    options = argparse.Namespace(command="", traceback="--traceback" in arguments)
    try:
        options = parse(arguments or ["--help"], commands, program)
        return importlib.import_module(commands[options.command][0]).run(options) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if options.traceback or not (isinstance(error, (ValueError, OSError, ImportError)) or why_no_room(error)):
            raise
        if isinstance(error, OSError) and error.strerror and error.filename:  # the system's own words
            error = OSError(f"{error.filename} cannot be used: {error.strerror}. Name another place, or free that one.")
        print(f"{program} {options.command}: {error}", file=sys.stderr)
        return USER_ERROR


def parse(arguments: Sequence[str], commands: Commands = COMMANDS, program: str = "hf-domino") -> argparse.Namespace:
    """Read a command line.

    Args:
        arguments (`Sequence[str]`): Command line without the program's name.
    """
    parser = argparse.ArgumentParser(program, description="Domino speculative decoding for Hugging Face Transformers.")
    parser.add_argument("--version", action="version", version=f"hf-domino {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in commands.items():
        subparser = subparsers.add_parser(
            name, help=summary, description=summary, formatter_class=_HelpFormatter, allow_abbrev=False
        )
        if arguments and arguments[0] == name:
            command = importlib.import_module(module)
            add = command.add_arguments
            if HELP & set(arguments):
                add = getattr(command, "add_help", add)
            add(subparser)
            subparser.add_argument("--traceback", action="store_true", help="show where an error came from")
            arguments = respell(subparser, name, arguments)
            subparser.epilog = f"examples:\n{command.EXAMPLES}"
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # the error shows the usage of the command, not of the whole program
        subparsers.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults except those of switches, and show examples without reformatting them."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, [], ()):
            return action.help
        return super()._get_help_string(action)
