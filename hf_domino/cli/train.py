"""`hf-domino train`: train a drafter for a target, from one YAML file, flags, or both (flags win)."""

from __future__ import annotations

import argparse
import json
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from hf_domino.cli.exits import BY_SIGNAL
from hf_domino.cli.train_plan import add_flags, run_plan
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments, TrainingFields

EXAMPLES = """\
  hf-domino train --target Qwen/Qwen3-0.6B --train-file data/train.jsonl --output-dir my-drafter
  hf-domino train --target Qwen/Qwen3-0.6B --train-file prompts.jsonl --on-policy true --output-dir my-drafter
  hf-domino train my.yaml --learning-rate 1e-3
  hf-domino train paper --target Qwen/Qwen3-8B --train-file data/train.jsonl --output-dir my-drafter
  hf-domino train my.yaml --plan
"""
USAGE = "hf-domino train [CONFIG] [--FIELD VALUE ...]"
PAPER = Path(__file__).parents[1] / "training" / "paper.yaml"
MOST_WANTED = (
    "target", "train_file", "train_dataset", "output_dir", "on_policy", "eval_file", "num_train_epochs",
    "learning_rate", "per_device_train_batch_size", "drafter", "overwrite",
)  # fmt: skip
# Fields of Transformers that most trainings set; the others are in --help-all.
FROM_TRANSFORMERS = {
    "output_dir": "Folder for the drafter, its checkpoints and the target's text.",
    "per_device_train_batch_size": "Rows per step and device.",
    "gradient_accumulation_steps": "Steps whose gradients are added up before the weights change.",
    "max_steps": "Steps to train, in place of num_train_epochs.",
    "bf16": "Compute in bfloat16.",
    "use_cpu": "Train on the CPU though there is a GPU.",
    "seed": "Of the drafter's weights and of the order of rows.",
    "save_steps": "Steps between checkpoints.",
    "eval_strategy": "When to evaluate beside the end: steps or epoch.",
    "eval_steps": "Steps between evaluations, with eval_strategy steps.",
    "report_to": "Where the log goes, such as tensorboard; none for nowhere.",
}
# Those that say something, spelled out where Transformers is not loaded; a test compares them.
TRANSFORMERS_DEFAULTS = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1, "seed": 42,
    "save_steps": 500, "eval_strategy": "no", "report_to": "none",
}  # fmt: skip
OWNERS = {
    "target, drafter and data": (ModelArguments, DataArguments),
    "shape of a new drafter (by default it follows the target)": (DrafterArguments,),
    "training": (TrainingFields,),
}


def add_help(parser: argparse.ArgumentParser) -> None:
    """List the fields that are ours or most wanted, without loading Transformers."""
    _begin(parser)
    ours = {field.name: field for owners in OWNERS.values() for owner in owners for field in fields(owner)}
    for title, names in _titles().items():
        group = parser.add_argument_group(title)
        for name in names:
            text = ours[name].metadata["help"] if name in ours else FROM_TRANSFORMERS[name]
            default = _default(ours[name]) if name in ours else TRANSFORMERS_DEFAULTS.get(name)
            group.add_argument(f"--{name}", action="store_const", const=None, help=text, default=default)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the YAML file and every field, those of Transformers' training arguments included, as flags."""
    from transformers import HfArgumentParser

    _begin(parser)
    title_of = {name: title for title, names in _titles().items() for name in names}
    groups = {title: parser.add_argument_group(title) for title in title_of.values()}
    others = parser.add_argument_group("the rest of Transformers' training arguments")
    for action in HfArgumentParser(_groups(), add_help=False)._actions:
        if action.help and action.default not in (None, False):
            action.help += f" (default: {action.default})".replace("%", "%%")
        action.default = argparse.SUPPRESS  # what is not given is left to the YAML file
        groups.get(title_of.get(action.dest, ""), others)._add_action(action)


def _begin(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.add_argument(
        "config", nargs="?", help="YAML file with any of the fields below, or paper, the published recipe for GPUs"
    )
    parser.add_argument("--help-all", action="help", help="show all of Transformers' fields too")
    add_flags(parser)


def _titles() -> dict[str, list[str]]:
    """The fields that are ours or most wanted, each once, by the title they stand under."""
    own = {title: [field.name for owner in owners for field in fields(owner)] for title, owners in OWNERS.items()}
    more = {"most wanted": list(MOST_WANTED), **own, "of Transformers' training arguments": list(FROM_TRANSFORMERS)}
    seen: set[str] = set()
    titles = {}
    for title, names in more.items():
        titles[title] = [name for name in names if name not in seen]
        seen |= set(names)
    return titles


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino train`; returns 130 where Ctrl-C ended the training early, 143 where SIGTERM did."""
    from hf_domino.pair import find_drafter, find_target
    from hf_domino.training.loading import check_data
    from hf_domino.training.run import train

    names, shape, data, args = parse_options(options)
    if names.target is None:
        raise ValueError("target must be set, as --target or in the YAML file.")
    if not options.plan or data.train_file or data.train_dataset:  # a plan does without text
        check_data(data)  # before anything is loaded or generated
    names.target = find_target(names.target, "target")
    names.drafter = names.drafter and find_drafter(names.drafter, "drafter")
    if options.plan:
        run_plan(options, names, shape, data, args)
        return 0
    ended_by = train(names, shape, data, args)
    return 0 if ended_by is None else BY_SIGNAL + ended_by


def parse_options(options: argparse.Namespace) -> tuple[Any, ...]:
    """Merge the YAML file and the flags into the four groups of arguments.

    Args:
        options (`argparse.Namespace`): With `config`, the YAML file or None, and the flags that were given.

    Raises:
        ValueError: If the file is not a mapping of known fields.
    """
    from transformers import HfArgumentParser

    from hf_domino.training.runs.resuming import begun_with

    parser = HfArgumentParser(_groups())
    known = {action.dest for action in parser._actions} - {"help"}
    flags = _yaml_flags(options.config, known) if options.config else []
    given = {name: value for name, value in vars(options).items() if name in known}
    fields = vars(parser.parse_args(flags)) | given
    if not fields["overwrite"]:
        run = str(fields["resume_from_checkpoint"] or fields["output_dir"])
        parser.set_defaults(**begun_with(run, fields["drafter"]))
        fields = vars(parser.parse_args(flags)) | given
    return parser.parse_dict(fields)


def _yaml_flags(config: str, known: set[str]) -> list[str]:
    """Fields of a YAML file, or of the published recipe, as command-line flags, so that both are converted alike."""
    import yaml

    path = PAPER if config == PAPER.stem else Path(config)
    if not path.is_file():
        raise ValueError(f"config must be a YAML file or {PAPER.stem!r}, got {config!r}: there is none of that name.")
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a mapping of fields to values, got {type(fields).__name__}.")
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{path}: field `{unknown[0]}` is not known. `hf-domino train --help-all` lists all fields.")
    flags = []
    for name, value in fields.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def _groups() -> tuple[type, ...]:
    from hf_domino.training.arguments import DominoTrainingArguments

    return ModelArguments, DrafterArguments, DataArguments, DominoTrainingArguments
