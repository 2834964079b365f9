"""The `hf-domino` command has one subcommand per task, each of which is imported only when it is called.

The module of a subcommand has `EXAMPLES`, `add_arguments(parser)` and `run(options) -> int | None`. Slow imports are
inside `run`, so that `--help` answers at once. If the flags come from slow modules, there is also `add_help(parser)`,
which replaces `add_arguments` for `--help`.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hf_domino._common.atomic_writes import why_no_room
from hf_domino._common.errors import OWN, is_own
from hf_domino._common.version import __version__
from hf_domino.cli.exits import INTERRUPTED, READER_GONE, USER_ERROR

# Name of a command, which is also the name of its module -> its line of help. The first five are those of a first day.
SUMMARIES = {
    "generate": "Answer one prompt with a target and its drafter, or compare with the target alone.",
    "chat": "Chat with a target and its drafter, and see each round.",
    "bench": "Measure how fast your model generates with each method.",
    "check": "Check whether a drafter fits its target, and if it does not, why.",
    "train": "Train a drafter for a target, with a YAML file, flags or both.",
    "explain": "Show which tokens the drafter wrote, on a page for your browser.",
    "run": "Start a program in which every generate of the target uses a drafter.",
    "data": "Let a target write the training text of its drafter.",
    "find": "List the drafters for a target on the Hub, and say which of them load.",
    "push": "Write a drafter's card, and publish its folder on the Hub.",
    "export": "Export a drafter for SGLang, vLLM and others.",
}
FIRST_DAY = ("generate", "chat", "bench", "check", "train")
COMMANDS = {name: (f"hf_domino.cli.{name}", summary) for name, summary in SUMMARIES.items()}
HELP = {"-h", "--help"}
TRUST = "trust_remote_code=True"  # in Transformers' error about a model that comes with code
Commands = Mapping[str, tuple[str, str]]
# Loggers whose warnings do not help the user: they concern torchao's kernels for other machines, torchao's calls of
# torch, and parameters that were placed on purpose.
CHATTER = ("torchao", "torch.utils._pytree", "accelerate.big_modeling")


def main(arguments: Sequence[str] | None = None, commands: Commands = COMMANDS, program: str = "hf-domino") -> int:
    """Run one subcommand.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line without the program's name. Defaults to `sys.argv[1:]`.
        commands (`Mapping`, *optional*): Module and line of help for each command. Defaults to the commands of
            `hf-domino`.
        program (`str`, *optional*, defaults to `"hf-domino"`): Name of the program.

    Returns:
        `int`: Exit code. 0 is success, 1 a failed check (outputs differ, or a drafter does not fit), 2 wrong input, 3
        too few measurements for a verdict, 130 an interrupt, 141 if the reader of the output is gone, and 143 a
        training that SIGTERM ended early.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT's use of Transformers
    for name in CHATTER:
        logging.getLogger(name).setLevel(logging.ERROR)
    options = argparse.Namespace(command="", traceback="--traceback" in arguments)
    try:
        options = parse(arguments or ["--help"], commands, program)
        code = importlib.import_module(commands[options.command][0]).run(options) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # such as `| head`, which has read enough
        with suppress(OSError, ValueError):  # so that Python does not try again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except Exception as error:
        needs_trust = isinstance(error, ValueError) and TRUST in str(error)
        system_error = error if isinstance(error, OSError) and error.strerror and error.filename else None
        packages = {*OWN, *(module.partition(".")[0] for module, _ in commands.values())}
        if options.traceback or not (is_own(error, packages) or system_error or needs_trust or why_no_room(error)):
            raise
        if needs_trust:
            error = ValueError(f"{error}\nThe option is --trust-remote-code.")
        if system_error is not None:
            what = f"{system_error.filename} cannot be used: {system_error.strerror}"
            error = OSError(f"{what}. Name another place, or free that one.")
        print(f"{program} {options.command}: {error}", file=sys.stderr)
        return USER_ERROR


def parse(arguments: Sequence[str], commands: Commands = COMMANDS, program: str = "hf-domino") -> argparse.Namespace:
    """Read a command line.

    Args:
        arguments (`Sequence[str]`): Command line without the program's name.
    """
    parser = argparse.ArgumentParser(
        program,
        description="Domino speculative decoding for Hugging Face Transformers.",
        epilog=_listed(commands, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hf-domino {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in commands.items():
        subparser = subparsers.add_parser(name, description=summary, formatter_class=_HelpFormatter, allow_abbrev=False)
        if arguments and arguments[0] == name:
            command = importlib.import_module(module)
            add = command.add_arguments
            if HELP & set(arguments):
                add = getattr(command, "add_help", add)
            add(subparser)
            subparser.add_argument("--traceback", action="store_true", help="show where an error came from")
            subparser.epilog = f"examples:\n{command.EXAMPLES}"
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # the error shows the usage of the command, not of the whole program
        subparsers.choices[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def _listed(commands: Commands, program: str) -> str:
    """List the commands with their lines of help, those of a first day apart from the others."""
    first = [name for name in FIRST_DAY if name in commands]
    others = [name for name in commands if name not in first]
    groups = {"commands of a first day": first, "more commands" if first else "commands": others}
    width = max(map(len, commands)) + 2
    lines = []
    for title, names in groups.items():
        if names:
            lines += [f"{title}:", *(f"  {name:<{width}}{commands[name][1]}" for name in names), ""]
    return "\n".join([*lines, f"{program} COMMAND --help shows the flags of a command, with examples."])


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults except those of switches, and show examples without reformatting them."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is False or action.default in (None, [], ()):
            return action.help
        return super()._get_help_string(action)
