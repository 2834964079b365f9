"""Stop and resume a run: which checkpoints are complete, and to which run a folder belongs.

A trainer writes `trainer_state.json` last, so a checkpoint without it belongs to a run that was killed while it saved.
The configuration of a checkpoint names the target and the shape, and its [`Run`] the arguments and the texts. Only the
number of steps can change when a run is resumed, and how it is logged and evaluated.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.atomic_writes import NO_LOCKS
from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino._common.run_record import Run, Text
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.adapters import TARGET_FILE
from hf_domino.formats.source import CONFIG, read_object
from hf_domino.targets.identity import TargetIdentity, check_same, difference
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.record import MUON, recorded_arguments
from hf_domino.training.fields import DrafterArguments

STATE_FILE = "trainer_state.json"
# Recorded arguments that can change: the number of steps, and what does not change the drafter.
CHANGEABLE = ("max_steps", "num_train_epochs", "minutes", "logging_steps", "walk_rows")
EXAMPLES_PER_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")  # factors of it
PER_STEP = " x ".join(EXAMPLES_PER_STEP)
PLANNED = ("max_steps", "per_device_train_batch_size", "num_anchors")  # chosen by a run with `minutes`
BASE_DIGEST = "digest of the drafter under the adapter"
START_AGAIN = "Choose another output_dir, or start again (--overwrite true; in Python, without resume_from_checkpoint)."


@contextmanager
def lock_folder(args: DominoTrainingArguments) -> Iterator[None]:
    """Lock `output_dir`; raise a `ValueError` if another run uses it, because runs delete each other's checkpoints."""
    # The lock is in the folder, whose parent may be read-only. No trainer pushes a file of this name to the Hub. With
    # `realpath`, it is one lock, however the folder is spelled.
    lock = FileLock(os.path.realpath(f"{args.output_dir}/_lock"))
    if args.process_index == 0:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            expected = "a folder that no other training writes to"
            remedy = "Wait until it ends, or choose another."
            raise invalid_argument("output_dir", expected, str(args.output_dir), remedy) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            notice(f"{args.output_dir} is on a filesystem without locks. Start no second training in it.")
    try:
        yield
    finally:
        if lock.is_locked:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)


def asked_checkpoint(args: DominoTrainingArguments) -> str | None:
    """Return the checkpoint that `resume_from_checkpoint` asks for, or None; `true` asks for the newest one.

    Raises:
        ValueError: If there is no such checkpoint.
    """
    asked = args.resume_from_checkpoint
    if asked is None or Path(asked).is_dir():
        return asked
    found = None
    remedy = "Leave it out: a run continues from its newest checkpoint, or begins if there is none."
    if str(asked).lower() == "true":
        found = last_checkpoint(str(args.output_dir))
        remedy = f"{args.output_dir} has no complete checkpoint. {remedy}"
    if found is None:
        raise invalid_argument("resume_from_checkpoint", "a folder of a checkpoint, or true", asked, remedy)
    return found


def find_checkpoint(args: DominoTrainingArguments, config: DominoConfig, overwrite: bool = False) -> str | None:
    """Find the checkpoint that a run resumes, or None for a new run.

    Args:
        args (`DominoTrainingArguments`): Arguments of this run.
        config (`DominoConfig`): Configuration of its drafter, which names the target.
        overwrite (`bool`, *optional*, defaults to `False`): Whether to start again.

    Raises:
        ValueError: If the checkpoint does not fit this run, or `output_dir` holds a finished run.
    """
    folder = Path(str(args.output_dir))
    if overwrite:
        if args.resume_from_checkpoint:
            remedy = "Leave one of them out: a run continues or starts again."
            raise invalid_argument("resume_from_checkpoint with overwrite", None, args.resume_from_checkpoint, remedy)
        return None
    checkpoint = args.resume_from_checkpoint or last_checkpoint(folder)
    if checkpoint:
        check_resumable(checkpoint, config, recorded_arguments(args, config))
    elif is_whole(folder):
        remedy = f"Train its drafter further with --drafter {folder} and another output_dir, or use --overwrite true."
        raise invalid_argument("output_dir", "a folder without a finished run", str(folder), remedy)
    return checkpoint


def last_checkpoint(output_dir: str | Path) -> str | None:
    """Find the newest complete checkpoint in a folder, which does not have to exist; print which ones are skipped."""
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in Path(output_dir).glob("*-*")}
    # At step 0, nothing was trained yet.
    numbered = (path for path, step in steps.items() if step.isdigit() and int(step))
    found = sorted(numbered, key=lambda path: -int(steps[path]))
    if partial := [path.name for path in found if not is_whole(path)]:
        notice(f"{output_dir}: unfinished {', '.join(partial)} of an interrupted run is ignored.")
    return next((str(path) for path in found if is_whole(path)), None)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint or a finished run was written completely: it has the trainer's state, which comes last."""
    try:
        read_object(folder / STATE_FILE)
    except (OSError, ValueError):
        return False
    return True


def delete_run(args: DominoTrainingArguments) -> None:
    """Delete the checkpoints and the state of an earlier run in `output_dir`."""
    folder = Path(str(args.output_dir))
    if args.process_index == 0:
        for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(path, ignore_errors=True)
        (folder / STATE_FILE).unlink(missing_ok=True)
    args.distributed_state.wait_for_everyone()


def check_resumable(
    checkpoint: str | Path,
    config: DominoConfig,
    arguments: Mapping[str, Any],
    texts: Mapping[str, Text] | None = None,
    base: str | None = None,
) -> None:
    """Raise a `ValueError` if a checkpoint was trained in another way than the run that would continue it.

    Args:
        checkpoint (`str` or `Path`): Folder of the checkpoint.
        config (`DominoConfig`): Configuration of the drafter, with its target and shape.
        arguments (`Mapping`): The arguments of the run, as a [`Run`] records them.
        texts (`Mapping`, *optional*): The texts of the run, as far as they are known yet.
        base (`str`, *optional*): Digest of the drafter under the adapter, if one is trained.
    """
    saved, target_of_adapter = (
        read_object(path) if path.is_file() else {}
        for path in (Path(checkpoint, CONFIG), Path(checkpoint, TARGET_FILE))
    )
    recorded = TargetIdentity.from_dict(target_of_adapter)
    if saved:
        recorded = TargetIdentity.recorded_in(DominoConfig.from_dict(saved))
    if found := TargetIdentity.recorded_in(config):
        check_same(recorded, found, str(checkpoint), START_AGAIN)
    own = {field.name for field in fields(config)} - {field.name for field in fields(DominoConfig)}
    shape = (*(field.name for field in fields(DrafterArguments)), *sorted(own))
    wanted = {name: getattr(config, name) for name in shape if hasattr(config, name)}
    if run := Run.load(checkpoint):
        saved.update(_as_recorded_now(run.arguments))
        changeable = {*CHANGEABLE, *EXAMPLES_PER_STEP}
        if arguments["minutes"] is not None:  # the run of the checkpoint chose these
            changeable |= {*PLANNED}
        elif run.arguments.keys() >= {*EXAMPLES_PER_STEP}:
            saved[PER_STEP] = _examples_per_step(run.arguments)
            wanted[PER_STEP] = _examples_per_step(arguments)
        ordered = ("position_weights", "muon_learning_rate", *arguments)  # others follow from the first two
        wanted |= {name: arguments[name] for name in ordered if name not in changeable}
        saved |= {f"{use}_dataset": _told(text) for use, text in run.texts.items() if text.digest}
        wanted |= {f"{use}_dataset": _told(text) for use, text in (texts or {}).items() if text.digest}
        if None not in (base, run.base_digest):
            parts = difference("weights_digest", str(run.base_digest), str(base))
            saved[BASE_DIGEST], wanted[BASE_DIGEST] = parts or (base, base)
    for name, value in wanted.items():
        before = saved.get(name, value)
        if before != value:
            made = f"{before!r}, with which {checkpoint} was trained"
            raise invalid_argument(name, made, value, f"Set it back. {START_AGAIN}")


def _as_recorded_now(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a record; older ones name a decay and an optimizer that were not used."""
    recorded = dict(arguments)
    if recorded.get("position_weights") == "dpace":
        recorded["loss_decay"] = None
    if recorded.get("muon_learning_rate") is not None:
        recorded["optim"] = MUON
    return recorded


def _examples_per_step(arguments: Mapping[str, Any]) -> int:
    """Return the product of batch size, accumulated batches and processes, which alone decides what a step learns."""
    return math.prod(arguments[name] for name in EXAMPLES_PER_STEP)


def _told(text: Text) -> str:
    return f"{text.examples} examples of digest {text.digest}"
