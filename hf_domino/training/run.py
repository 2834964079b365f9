"""Train from names and files to a folder with drafter, tokenizer and card, as `hf-domino train` does."""

from __future__ import annotations

import copy
import shlex
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, set_seed
from transformers.integrations import integration_utils

from hf_domino._common.atomic_writes import MAKE_ROOM, check_writable, needing_room, write_atomic
from hf_domino._common.errors import invalid_argument, is_own
from hf_domino._common.notices import notice
from hf_domino._common.run_record import RUN_FILE
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.configuration.from_target import within_window
from hf_domino.configuration.registry import METHODS, config_classes
from hf_domino.formats.fields import CONVOLUTION
from hf_domino.formats.source import has_model
from hf_domino.methods import DominoDraftModel
from hf_domino.targets.identity import identify
from hf_domino.targets.loading import load_target, place_target, trusting
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments
from hf_domino.training.hidden_states.folder import CachedRows
from hf_domino.training.hidden_states.writing import StateWriter
from hf_domino.training.loading import load_training_rows, new_drafter, sources_of, take_frequent_tokens
from hf_domino.training.parts import BLOCK_SIZE, extend_drafter, fields_of_head
from hf_domino.training.plan import follow_minutes, print_requirements, resume_plan
from hf_domino.training.resuming import asked_checkpoint, delete_run, find_checkpoint, lock_folder
from hf_domino.training.trainer import DominoTrainer
from hf_domino.training.warm_start import start_from_target

PACKAGES = {
    "azure_ml": "azureml",
    "comet_ml": "comet",
    "flyte": "flytekit",
}  # names in Transformers' checks, if they differ


def train(names: ModelArguments, shape: DrafterArguments, data: DataArguments, args: DominoTrainingArguments) -> bool:
    """Train a drafter, save it with its tokenizer to `output_dir`, and print the evaluation.

    Args:
        names (`ModelArguments`): The target, and the drafter to train further if there is one.
        shape (`DrafterArguments`): Shape of a new drafter.
        data (`DataArguments`): Files or data sets to train and evaluate on.
        args (`DominoTrainingArguments`): How to train.

    Returns:
        `bool`: False if SIGTERM ended the training early, with `enable_jit_checkpoint`.

    Raises:
        ValueError: If a field is out of range, or a file is malformed.
    """
    since = time.perf_counter()
    check_fields(names, shape, data, args)
    folder = Path(str(args.output_dir))
    check_writable(folder, "output_dir")
    if not (folder / RUN_FILE).is_file() and has_model(folder):
        remedy = "Choose another: the drafter would be written over it."
        raise invalid_argument("output_dir", "a folder without a model that was made elsewhere", str(folder), remedy)
    with lock_folder(args), recorded_error(folder, args), needing_room(folder, MAKE_ROOM):
        trainer, checkpoint = make_trainer(names, shape, data, args, since)
        if trainer.is_world_process_zero():
            print_requirements(trainer)
        if names.overwrite:
            delete_run(args)
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.state.global_step < trainer.state.max_steps:
            return False
        trainer.save_model()
        metrics = {}
        if trainer.eval_dataset is not None:
            metrics = trainer.evaluate()
        trainer.save_state()
        trainer.create_model_card()
        if trainer.is_world_process_zero():
            figures = [f"{name:36} {value:.4g}" for name, value in sorted(metrics.items())]
            print(*figures, _next_steps(str(names.target), args, data), sep="\n")
        if metrics:
            trainer.save_metrics("eval", metrics)
    return True


@contextmanager
def recorded_error(folder: Path, args: DominoTrainingArguments) -> Iterator[None]:
    """Write the traceback of an error that is not a sentence for the user into the folder of a run."""
    path = folder / (f"error-{args.process_index}.txt" if args.world_size > 1 else "error.txt")
    try:
        yield
    except Exception as error:
        if not is_own(error):
            with suppress(OSError):
                write_atomic(path, "".join(traceback.format_exception(error)))
                notice(f"the traceback of this error is in {path}.")
        raise
    path.unlink(missing_ok=True)


def make_trainer(
    names: ModelArguments,
    shape: DrafterArguments,
    data: DataArguments,
    args: DominoTrainingArguments,
    since: float,
) -> tuple[DominoTrainer, str | None]:
    """Make the trainer of a run that began at `since` (by `time.perf_counter`), and find the checkpoint to resume."""
    trust = trusting(names.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(names.target, **trust)
    target = load_target(str(names.target), args.device.type, names.target_dtype, **trust)
    if not names.cache_hidden_states:  # with which the target does not run in training
        place_target(target, args.device)
    set_seed(args.seed)  # for a new drafter's weights; the trainer sets it again for the order of the examples
    overrides = shape.overrides()
    if names.drafter is None:
        drafter = new_drafter(target, tokenizer, args, overrides)
    else:
        drafter = extend_drafter(DominoDraftModel.from_pretrained(names.drafter, dtype=torch.float32), overrides)
    identify(target).record_in(drafter.config)
    args.max_length = within_window(target.config, args.max_length)
    checkpoint = find_checkpoint(args, drafter.config, names.overwrite)
    if checkpoint and args.minutes is not None:
        resume_plan(args, checkpoint)
    rows = load_training_rows(data, args, target, tokenizer)
    if names.drafter is None and not checkpoint:  # a checkpoint has its own tokens and weights
        take_frequent_tokens(drafter, rows[0], args)
        text = rows[0][0]["input_ids"]
        if names.start_from_target:
            start_from_target(drafter, target, text)
        elif names.start_from_target is None and args.minutes is not None:
            started = copy.deepcopy(drafter)
            try:
                start_from_target(started, target, text)
                drafter = started
            except ValueError as error:
                notice(f"the drafter starts from random weights, not from the target's layers: {error}")
    if names.cache_hidden_states:
        rows = with_states(target, drafter.config, rows, names, args)
    callbacks = []
    if args.minutes is not None and not checkpoint:
        callbacks.append(follow_minutes(drafter, target, args, rows[0], rows[1], since))
    trainer = DominoTrainer(
        drafter,
        target,
        args,
        train_dataset=rows[0],
        eval_dataset=rows[1],
        processing_class=tokenizer,
        callbacks=callbacks,
    )
    return trainer, checkpoint


def with_states(
    target: PreTrainedModel,
    config: DominoConfig,
    rows: Sequence[Any],
    names: ModelArguments,
    args: DominoTrainingArguments,
) -> list[CachedRows | None]:
    """Write the missing hidden states, add them to the examples, and keep only embeddings and lm_head on the device."""
    folder = Path(str(names.cache_hidden_states))
    final = args.distillation_weight > 0
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    autocast = partial(torch.autocast, args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16)
    shard = (args.process_index, args.world_size)
    writer = StateWriter(target, config, folder, names.cache_dtype, final, autocast, shard)
    if lacking := [part for part in rows if part is not None and writer.missing(part)]:
        place_target(target, args.device)
    for part in lacking:
        writer.write(part, progress=args.process_index == 0)
    args.distributed_state.wait_for_everyone()
    if not getattr(target, "is_quantized", False):  # a quantised target stays where it was loaded
        target.cpu()
        for end in (target.get_input_embeddings(), target.get_output_embeddings()):
            end.to(args.device)
    return [None if part is None else CachedRows(part, folder, target, config, final) for part in rows]


def check_reports(args: DominoTrainingArguments) -> None:
    """Raise a `ValueError` if the package of a place to which the log is sent is not installed."""
    for name in args.report_to or ():
        # Transformers' own checks, which its callbacks would make after the examples are tokenized.
        is_available = getattr(integration_utils, f"is_{PACKAGES.get(name, name)}_available", None)
        if is_available is not None and not is_available():
            raise invalid_argument(
                "report_to", "a package that is installed, or none", name, f"Install {name}, or leave it out."
            )


def check_fields(
    names: ModelArguments, shape: DrafterArguments, data: DataArguments, args: DominoTrainingArguments
) -> None:
    """Raise a `ValueError` if fields name no text or contradict each other, before anything is loaded."""
    sources_of(data)
    if not names.overwrite:
        args.resume_from_checkpoint = asked_checkpoint(args)
    check_reports(args)
    if names.drafter is not None and names.start_from_target:
        remedy = "The drafter has weights already: set one of the two."
        raise invalid_argument("start_from_target with drafter", False, True, remedy)
    if args.minutes is not None and args.world_size > 1:
        remedy = "Each process would make its own plan: set max_steps and num_anchors."
        raise invalid_argument("minutes with several processes", "left out", args.minutes, remedy)
    if args.minutes is not None and args.eval_strategy != "no":
        remedy = "Its time is planned for steps and one evaluation at the end: leave one of the two out."
        raise invalid_argument("eval_strategy with minutes", "no", args.eval_strategy.value, remedy)
    if args.eval_strategy != "no" and data.eval_file is None:
        raise invalid_argument("eval_strategy", "no without eval_file", args.eval_strategy.value, "Set eval_file too.")
    overrides = shape.overrides()
    for name in ("train_only", "use_peft"):
        if names.drafter is None and (value := getattr(args, name)):
            remedy = "Name the drafter to start from: --drafter FOLDER."
            raise invalid_argument(f"{name} of a new drafter", None, value, remedy)
    if args.use_peft and overrides:
        remedy = "An adapter has the shape of its drafter: leave one of them out."
        raise invalid_argument(f"use_peft with {', '.join(overrides)}", False, True, remedy)
    of_head = [name for name in overrides if name not in (BLOCK_SIZE, CONVOLUTION)]
    default = DominoConfig.projector_type if names.drafter is None else ""
    method = METHODS.get(overrides.get("projector_type", default))
    if method is not None:
        method.config_class.refuse_unknown(set(overrides) - method.config_class.fields_beside())
    if names.drafter is None:
        return
    if of_head and (method is None or not set(of_head) <= fields_of_head(method.config_class)):
        heads = [each.projector_type for each in config_classes() if fields_of_head(each)]
        raise ValueError(
            f"{', '.join(of_head)} must be left out with drafter={names.drafter!r}, because "
            f"the drafter has its own shape. You can only change block_size, add convolutions (conv_kernel_size), "
            f"or give a DFlash drafter a correction head (projector_type={' or '.join(heads)})."
        )


def _next_steps(name: str, args: DominoTrainingArguments, data: DataArguments) -> str:
    """Return the commands that you would run next with a trained drafter."""
    file = str(data.eval_file)
    prompts = ""
    if Path(file).is_file():
        prompts = f" --prompts {shlex.quote(file)}"
    dtype = "float32"
    if args.bf16:
        dtype = "bfloat16"
    elif args.fp16:
        dtype = "float16"
    device = args.device.type
    where = ""
    if (device, dtype) != ("cpu", "float32"):
        where = f" --device {device} --dtype {dtype}"
    folder = shlex.quote(args.output_dir)
    pair = f"--target {shlex.quote(name)} --drafter {folder}{where}"
    return "\n  ".join(
        (
            f"The drafter is in {args.output_dir}. To check it, measure its speed and write its card:",
            f"hf-domino check {pair}{prompts}",
            f"hf-domino bench {pair}{prompts} --results {folder}/results.jsonl",
            f"hf-domino push {folder} --card-only",
        )
    )
