"""`hf-domino train`: train a drafter for a target, from one YAML file, flags, or both (flags win)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hf_domino.cli.exits import BY_SIGNAL
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments, TrainingFields

EXAMPLES = """\
  hf-domino train --target Qwen/Qwen3-0.6B --train-file data/train.jsonl --output-dir my-drafter
  hf-domino train my.yaml --learning-rate 1e-3
  hf-domino train paper --target Qwen/Qwen3-8B --train-file data/train.jsonl --output-dir my-drafter
  hf-domino train my.yaml --plan
"""
USAGE = "hf-domino train [CONFIG] [--FIELD VALUE ...]"
ON_POLICY = "The target writes its text before it is trained on: `hf-domino data --target ... --output FOLDER`."
PAPER = Path(__file__).parents[1] / "training" / "paper.yaml"
MOST_WANTED = (
    "target", "train_file", "output_dir", "eval_file", "num_train_epochs", "learning_rate",
    "per_device_train_batch_size", "drafter", "overwrite",
)  # fmt: skip
# Fields of Transformers that most trainings set; the others are in --help-all.
FROM_TRANSFORMERS = {
    "output_dir": "Folder for the drafter and its checkpoints.",
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
            default = ours[name].default if name in ours else TRANSFORMERS_DEFAULTS.get(name)
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
    parser.add_argument("--on-policy", nargs="?", const="", type=_refuse_on_policy, help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action="help", help="show all of Transformers' fields too")
    parser.add_argument("--plan", action="store_true", help="take a few steps, say their time and memory, keep nothing")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes and seconds")


def _refuse_on_policy(value: str) -> None:
    raise argparse.ArgumentTypeError(ON_POLICY)


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


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino train`; returns 130 where Ctrl-C ended the training early, 143 where SIGTERM did."""
    from hf_domino.pair import find_drafter, find_target
    from hf_domino.training.plan import measure_steps
    from hf_domino.training.run import train

    names, shape, data, args = parse_options(options)
    if names.target is None:
        raise ValueError("target must be set, as --target or in the YAML file.")
    names.target = find_target(names.target, "target")
    names.drafter = names.drafter and find_drafter(names.drafter, "drafter")
    if options.plan:
        _print_plan(measure_steps(names, shape, data, args), options.json)
        return 0
    ended_by = train(names, shape, data, args)
    return 0 if ended_by is None else BY_SIGNAL + ended_by


def _print_plan(steps: Any, as_json: bool) -> None:
    """Print what steps took."""
    if as_json:
        print(json.dumps(asdict(steps)))
        return
    print(f"{steps.rows_per_step} rows a step, on {steps.device}")
    print(f"  {'seconds per step':32}{steps.seconds_per_step:10.4g}")
    print(f"  {'memory, GB':32}{steps.memory_bytes / 1e9:10.4g}")
    if steps.hours is not None:
        print(f"  {f'hours for {steps.steps:,} steps':32}{steps.hours:10.4g}")


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
    names = {action.dest for action in parser._actions} - {"help"}
    flags = _yaml_flags(options.config, parser._option_string_actions) if options.config else []
    given = {name: value for name, value in vars(options).items() if name in names}
    fields = vars(parser.parse_args(flags)) | given
    if not fields["overwrite"]:
        run = str(fields["resume_from_checkpoint"] or fields["output_dir"])
        parser.set_defaults(**begun_with(run, fields["drafter"]))
        fields = vars(parser.parse_args(flags)) | given
    return parser.parse_dict(fields)


def _yaml_flags(config: str, known: Collection[str]) -> list[str]:
    """Fields of a YAML file, or of the published recipe, as command-line flags, so that both are converted alike."""
    import yaml

    path = PAPER if config == PAPER.stem else Path(config)
    if not path.is_file():
        raise ValueError(f"config must be a YAML file or {PAPER.stem!r}, got {config!r}: there is none of that name.")
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a mapping of fields to values, got {type(fields).__name__}.")
    if unknown := sorted(name for name in fields if f"--{name}" not in known):
        way_out = ON_POLICY if "on_policy" in unknown[0] else "`hf-domino train --help-all` lists all fields."
        raise ValueError(f"{path}: field `{unknown[0]}` is not known. {way_out}")
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
