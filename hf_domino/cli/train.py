"""`hf-domino train`: train a drafter for a target, from one YAML file, flags, or both (flags win)."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed

from hf_domino.cli.exits import TERMINATED
from hf_domino.configuration import DominoConfig
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.identity import identify
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.data import RowDataset, load_rows, read_rows
from hf_domino.training.notices import notice
from hf_domino.training.on_policy import generate_on_policy
from hf_domino.training.resuming import prepare_folder
from hf_domino.training.trainer import DominoTrainer

GREEDY = (0.0,)
CURRICULUM_RESTARTS = (
    "{}: lambda_base starts at 1 again, so its correction head rests at first while its base logits are trained. "
    "Set lambda_base_decay_ratio to 0 to train the corrected loss from the first step."
)


@dataclass
class DrafterArguments:
    """Shape of a new drafter; what is left out is chosen by [`DominoConfig.for_target`]."""

    num_hidden_layers: int | None = field(default=None, metadata={"help": "Layers of the backbone."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Width of the MLPs."})
    block_size: int | None = field(default=None, metadata={"help": "Positions of a block, anchor included."})
    projector_type: str | None = field(default=None, metadata={"help": "domino, or dflash for no correction head."})
    gru_hidden_dim: int | None = field(default=None, metadata={"help": "Width of the prefix state."})
    emb_dim: int | None = field(default=None, metadata={"help": "Low rank of the correction head."})
    pure_draft_prefix_len: int | None = field(default=None, metadata={"help": "Proposals that are not corrected."})
    shift_label: bool | None = field(default=None, metadata={"help": "Block position k predicts the token after it."})
    mask_token_id: int | None = field(default=None, metadata={"help": "Token whose embedding fills the block."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Target layers that are read."})

    def overrides(self) -> dict[str, Any]:
        """The fields that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class ModelArguments:
    """Which target, and whether to go on with what exists."""

    target: str | None = field(default=None, metadata={"help": "Folder or Hub name of the target."})
    target_dtype: str = field(default="auto", metadata={"help": "dtype of the target: auto, float32, bfloat16."})
    drafter: str | None = field(default=None, metadata={"help": "A drafter to train further, instead of a new one."})
    overwrite: bool = field(default=False, metadata={"help": "Start again where output_dir holds an earlier run."})


@dataclass
class DataArguments:
    """What to train on."""

    train_file: str | None = field(default=None, metadata={"help": "A .jsonl or text file."})
    eval_file: str | None = field(default=None, metadata={"help": "Like train_file, for evaluation."})
    on_policy: bool = field(default=False, metadata={"help": "Let the target write the supervised part of every row."})
    on_policy_prompt_length: int = field(default=64, metadata={"help": "Tokens of plain text to use as a prompt."})
    on_policy_max_new_tokens: int = field(default=256, metadata={"help": "Longest text of the target, in tokens."})
    on_policy_temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.7, 1.0], metadata={"help": "Temperatures of its batches in turn; 0 is greedy."}
    )
    on_policy_batch_size: int = field(default=64, metadata={"help": "Prompts per batch."})


GROUPS = (ModelArguments, DrafterArguments, DataArguments, DominoTrainingArguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the YAML file and every field of the four groups of arguments as flags."""
    parser.add_argument("config", nargs="?", help="YAML file with any of the fields below")
    fields = HfArgumentParser(GROUPS, add_help=False)
    for action in fields._actions:
        action.default = argparse.SUPPRESS  # what is not given is left to the YAML file
    parser._add_container_actions(fields)  # what argparse does with `parents`


def run(options: argparse.Namespace) -> int:
    """Train, save drafter and tokenizer to `output_dir`, and print the evaluation.

    Args:
        options (`argparse.Namespace`): Parsed flags.

    Returns:
        `int`: 0, or 143 where SIGTERM ended the training early.

    Raises:
        ValueError: If a field is unknown, missing or out of range, or a file holds what it should not.
    """
    names, shape, data, args = parse_options(options)
    for name, value in (("target", names.target), ("train_file", data.train_file)):
        if value is None:
            raise ValueError(f"{name} must be set, as --{name} or in the YAML file.")
    for name in ("train_file", "eval_file"):  # before anything is loaded or generated
        path = getattr(data, name)
        if path is not None and not Path(path).is_file():
            raise ValueError(f"{name} must be a .jsonl, .json or text file, got {path!r}: there is none of that name.")
    tokenizer = AutoTokenizer.from_pretrained(names.target)
    target = AutoModelForCausalLM.from_pretrained(names.target, dtype=names.target_dtype).to(args.device).eval()
    set_seed(args.seed)  # a new drafter's weights; the trainer sets it again for the order of rows
    drafter = _build_drafter(names, shape, target, tokenizer)
    identify(target, tokenizer).record_in(drafter.config)
    checkpoint, finished = prepare_folder(args, drafter.config, names.overwrite)
    if finished:
        notice(finished)
        return 0
    train_rows = _load(data, args, "train", target, tokenizer, names.overwrite)
    eval_rows = _load(data, args, "eval", target, tokenizer, names.overwrite) if data.eval_file else None
    trainer = DominoTrainer(
        drafter, target, args, train_dataset=train_rows, eval_dataset=eval_rows, processing_class=tokenizer
    )
    if names.drafter and not checkpoint and drafter.has_correction_head and args.lambda_base_decay_ratio > 0:
        notice(CURRICULUM_RESTARTS.format(names.drafter))
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.stopped_by_signal:
        return TERMINATED
    trainer.save_model()
    metrics = {} if eval_rows is None else trainer.evaluate()
    trainer.save_state()
    if trainer.is_world_process_zero():
        trainer.create_model_card()
        figures = [f"{name:32} {value:.4g}" for name, value in sorted(metrics.items())]
        print(*figures, _next_steps(names.target, target, args), sep="\n")
    if metrics:
        trainer.save_metrics("eval", metrics)
    return 0


def _next_steps(name: str, target: PreTrainedModel, args: DominoTrainingArguments) -> str:
    """What one does with a trained drafter, as commands."""
    where = "" if args.device.type == "cpu" else f" --device {args.device.type}"
    dtype = "" if target.dtype == torch.float32 else f" --dtype {str(target.dtype).removeprefix('torch.')}"
    folder = shlex.quote(args.output_dir)
    pair = f"--target {shlex.quote(name)} --drafter {folder}{where}{dtype}"
    return (
        f"The drafter is in {args.output_dir}. Whether it fits, and what it is worth:\n"
        f"  hf-domino check {pair}\n  hf-domino bench {pair} --rows {folder}/rows.jsonl"
    )


def parse_options(options: argparse.Namespace) -> tuple[Any, ...]:
    """Merge the YAML file and the flags into the four groups of arguments.

    Args:
        options (`argparse.Namespace`): With `config`, the YAML file or None, and the flags that were given.

    Raises:
        ValueError: If the file is not a mapping of known fields.
    """
    parser = HfArgumentParser(GROUPS)
    known = {action.dest for action in parser._actions} - {"help"}
    flags = _yaml_flags(Path(options.config), known) if options.config else []
    fields = vars(parser.parse_args(flags)) | {name: value for name, value in vars(options).items() if name in known}
    return parser.parse_dict(fields)


def _yaml_flags(path: Path, known: set[str]) -> list[str]:
    """Fields of a YAML file as command-line flags, so that both are converted alike."""
    if not path.is_file():
        raise ValueError(f"config must be a YAML file, got {str(path)!r}: there is none of that name.")
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a mapping of fields to values, got {type(fields).__name__}.")
    if unknown := sorted(set(fields) - known):
        raise ValueError(f"{path}: field `{unknown[0]}` is not known. `hf-domino train --help` lists all fields.")
    flags = []
    for name, value in fields.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def _build_drafter(
    names: ModelArguments, shape: DrafterArguments, target: PreTrainedModel, tokenizer: Any
) -> DominoDraftModel:
    overrides = shape.overrides()
    if names.drafter is None:
        return DominoDraftModel(DominoConfig.for_target(target.config, tokenizer, **overrides))
    if overrides:
        raise ValueError(
            f"{', '.join(overrides)} must not be set with drafter={names.drafter!r}: the drafter has its own shape."
        )
    return DominoDraftModel.from_pretrained(names.drafter, dtype=torch.float32)


def _load(
    data: DataArguments, args: DominoTrainingArguments, split: str, target: Any, tokenizer: Any, overwrite: bool
) -> RowDataset:
    """Rows of a file, or of what the target writes in place of their supervised part; greedily for evaluation."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    rows = load_rows(getattr(data, f"{split}_file"), tokenizer, args.max_length, vocab_size)
    if not data.on_policy:
        return rows
    world = range(args.world_size)
    outputs = [Path(args.output_dir) / f"on_policy_{split}-{rank + 1}-of-{len(world)}.jsonl" for rank in world]
    generate_on_policy(
        target,
        rows.prompts(data.on_policy_prompt_length),
        outputs[args.process_index],
        max_new_tokens=data.on_policy_max_new_tokens,
        temperatures=data.on_policy_temperatures if split == "train" else GREEDY,
        batch_size=data.on_policy_batch_size,
        seed=args.seed,
        shard=(args.process_index, len(world)),
        progress=args.process_index == 0,
        overwrite=overwrite,
    )
    args.distributed_state.wait_for_everyone()
    longest = args.max_length + data.on_policy_max_new_tokens
    return RowDataset([row for output in outputs for row in read_rows(output, max_length=longest)])
