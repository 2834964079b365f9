"""`hf-domino train`: train a drafter for a target with a YAML file, flags, or both (flags win)."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hf_domino._common.options import TRUE_OR_FALSE, add_flags
from hf_domino.cli.exits import BY_SIGNAL
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments, TrainingFields

EXAMPLES = """\
  hf-domino train --target Qwen/Qwen3-0.6B --train-file data/train.jsonl --output-dir my-drafter
  hf-domino train my.yaml --learning-rate 1e-3
  hf-domino train paper --target Qwen/Qwen3-8B --train-file data/train.jsonl --output-dir my-drafter
"""
USAGE = "hf-domino train [CONFIG] [--FIELD VALUE ...]"
PAPER = Path(__file__).parents[1] / "training" / "paper.yaml"
# Fields of Transformers that most training runs set.
FROM_TRANSFORMERS = {
    "output_dir": "Folder for the drafter and its checkpoints.",
    "per_device_train_batch_size": "Number of examples per step and device.",
    "gradient_accumulation_steps": "Number of batches whose gradients are added up before the weights change.",
    "max_steps": "Number of training steps, instead of num_train_epochs.",
    "bf16": "Compute in bfloat16.",
    "use_cpu": "Train on the CPU even if there is a GPU.",
    "seed": "Random seed for a new drafter's weights and the order of the examples.",
    "save_steps": "Number of steps between checkpoints.",
    "eval_strategy": "When to evaluate, besides at the end: steps or epoch.",
    "eval_steps": "Number of steps between evaluations, with eval_strategy steps.",
    "report_to": "Where to send the log, such as tensorboard, or none.",
}
SWITCHES = ("bf16", "use_cpu")  # those of them that are true or false
# Title of a group of flags -> the classes that declare them, none of which needs Transformers.
OWNERS = {
    "target, drafter and data": (ModelArguments, DataArguments),
    "shape of a new drafter (by default it follows the target)": (DrafterArguments,),
    "training": (TrainingFields,),
}
OTHERS = "All other fields of transformers.TrainingArguments are flags, too."


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add our own fields and the most common ones of Transformers for `--help`, without importing Transformers."""
    _begin(parser)
    for title, owners in OWNERS.items():
        group = parser.add_argument_group(title)
        for owner in owners:
            add_flags(group, owner, has_switches=False)
    group = parser.add_argument_group("from Transformers' training arguments", OTHERS)
    for name, text in FROM_TRANSFORMERS.items():
        value = TRUE_OR_FALSE if name in SWITCHES else {}
        group.add_argument(f"--{name.replace('_', '-')}", help=text, **value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the YAML file and every field as flags, including those of Transformers' training arguments."""
    from transformers import HfArgumentParser
    from transformers.hf_argparser import string_to_bool

    _begin(parser)
    for action in HfArgumentParser(_groups(), add_help=False)._actions:
        action.default = argparse.SUPPRESS  # so that the YAML file decides about flags that are not given
        if action.type is string_to_bool:  # also for `bool | None`, for which the parser would require a value
            action.nargs = "?"
            action.const = True
        parser._add_action(action)


def _begin(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.add_argument(
        "config", nargs="?", help="YAML file with any of the fields below, or the word paper for the published recipe"
    )


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino train`, and return 130 or 143 if Ctrl-C or SIGTERM ended the training early."""
    from hf_domino.pair import find_drafter, find_target
    from hf_domino.training.run import train

    names, shape, data, args = parse_options(options)
    if names.target is None:
        raise ValueError("target must be a folder or a Hub name, got None. Set it with --target or in the YAML file.")
    names.target = find_target(names.target, "target")
    if names.drafter:
        names.drafter = find_drafter(names.drafter, "drafter")
    ended_by = [signal.SIGTERM]
    before = signal.getsignal(signal.SIGINT)

    def interrupt(*_: Any) -> None:
        """Save a checkpoint as on SIGTERM, but end at once if there is none to save or on a second Ctrl-C."""
        if signal.SIGINT in ended_by or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            raise KeyboardInterrupt
        print("Saving a checkpoint before the training ends. Press Ctrl-C again to end it at once.", file=sys.stderr)
        ended_by.append(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    # Several processes would save at different steps, and only the main thread can receive signals.
    listens = args.world_size == 1 and threading.current_thread() is threading.main_thread()
    if listens:
        args.enable_jit_checkpoint = True
        signal.signal(signal.SIGINT, interrupt)
    try:
        if train(names, shape, data, args):
            return 0
        print("Run the same command again to continue the training.", file=sys.stderr)
        return BY_SIGNAL + ended_by[-1]
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)


def parse_options(options: argparse.Namespace) -> tuple[Any, ...]:
    """Merge the YAML file and the flags into the four groups of arguments.

    Args:
        options (`argparse.Namespace`): The flags that were given, and `config`, which is the YAML file or None.

    Raises:
        ValueError: If the file is not a mapping of known fields.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(_groups(), exit_on_error=False)
    names = {action.dest for action in parser._actions} - {"help"}
    flags: list[str] = []
    empty: list[str] = []
    if options.config:
        flags, empty = _yaml_flags(options.config, parser._option_string_actions)
    given = {name: value for name, value in vars(options).items() if name in names}
    try:
        values = vars(parser.parse_args(flags))
    except argparse.ArgumentError as error:
        raise ValueError(f"{options.config}: {error}") from error
    try:
        return parser.parse_dict(values | dict.fromkeys(empty) | given)
    except ValueError as error:  # of Transformers' fields, which it checks itself
        raise ValueError(str(error)) from error


def _yaml_flags(config: str, known: Collection[str]) -> tuple[list[str], list[str]]:
    """Turn the fields of a YAML file, or of the published recipe, into flags, so that argparse converts both alike.

    Fields that are null, for which there is no flag, are returned beside the flags.
    """
    import yaml

    path = PAPER if config == PAPER.stem else Path(config)
    if not path.is_file():
        raise ValueError(f"config must be a YAML file or {PAPER.stem!r}, got {config!r}, which does not exist.")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a mapping of fields to values, got {type(fields).__name__}.")
    unknown = sorted(name for name in fields if f"--{name}" not in known)
    if unknown:
        raise ValueError(f"{path}: field `{unknown[0]}` is not known. See `hf-domino train --help`.")
    flags = []
    empty = [name for name, value in fields.items() if value is None]
    types = {name: kind for group in _groups() for name, kind in get_type_hints(group).items()}
    for name in empty:
        if type(None) not in get_args(types[name]):
            raise ValueError(f"{path}: field `{name}` must have a value, got null. Leave it out for its default.")
    for name, value in fields.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            flags.append(f"--{name}={json.dumps(value)}")
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags, empty


def _groups() -> tuple[type, ...]:
    from hf_domino.training.arguments import DominoTrainingArguments

    return ModelArguments, DrafterArguments, DataArguments, DominoTrainingArguments
