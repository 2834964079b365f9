"""What lets a run be stopped and gone on with: whole checkpoints, and which run a folder belongs to.

A trainer writes `trainer_state.json` last: a checkpoint without it is one of a run that was killed inside a save. A
checkpoint's configuration names its target and shape, and `run.json` beside it what its optimizer keeps; these cannot
be changed on the way.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.adapters import TARGET_FILE
from hf_domino.formats.source import CONFIG, read_object
from hf_domino.target.identity import TargetIdentity, check_same
from hf_domino.training.arguments import LORA, DominoTrainingArguments
from hf_domino.training.fields import DrafterArguments

STATE_FILE = "trainer_state.json"
RUN_FILE = "run.json"
# What the optimizer's state decides.
KEPT = ("optim", "learning_rate", "muon_learning_rate", "weight_decay", "train_only", "use_peft", *LORA)
BASE_DIGEST = "digest of the drafter under the adapter"
START_AGAIN = "Choose another output_dir, or start again (--overwrite true; in Python, without resume_from_checkpoint)."


@contextmanager
def alone_in_folder(args: DominoTrainingArguments) -> Iterator[None]:
    """Refuse a second run in `output_dir` while one is at work there: each would delete the other's checkpoints."""
    # In the folder, because nothing beside it may be writable, and by a name that no trainer pushes to the Hub.
    lock = FileLock(os.path.realpath(f"{args.output_dir}/_lock"))
    if args.process_index == 0:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            expected = "a folder that no other training writes to"
            remedy = "Wait until it ends, or choose another."
            raise refusal("output_dir", expected, str(args.output_dir), remedy) from None
    try:
        yield
    finally:
        if lock.is_locked:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)


def find_checkpoint(args: DominoTrainingArguments, config: DominoConfig, overwrite: bool = False) -> str | None:
    """Find the checkpoint in `output_dir` that a run goes on from, before any work.

    Args:
        args (`DominoTrainingArguments`): Of this run.
        config (`DominoConfig`): Of its drafter, which names its target.
        overwrite (`bool`, *optional*, defaults to `False`): Whether it starts again.
    """
    folder = Path(str(args.output_dir))
    if overwrite:
        if args.resume_from_checkpoint:
            remedy = "Leave one of them out: a run continues or starts again."
            raise refusal("resume_from_checkpoint with overwrite", None, args.resume_from_checkpoint, remedy)
        return None
    checkpoint = args.resume_from_checkpoint or last_checkpoint(folder)
    if checkpoint:
        check_resumable(checkpoint, config, args)
    elif is_whole(folder):
        remedy = f"Train its drafter further with --drafter {folder} and another output_dir, or use --overwrite true."
        raise refusal("output_dir", "a folder without a finished run", str(folder), remedy)
    return checkpoint


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint in a folder, which need not exist; those that are not are skipped with a word."""
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in Path(output_dir).glob("*-*")}
    found = sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: -int(steps[path]))
    if partial := [path.name for path in found if not is_whole(path)]:
        notice(f"{output_dir}: unfinished {', '.join(partial)} of an interrupted run is ignored.")
    return next((str(path) for path in found if is_whole(path)), None)


def is_whole(folder: Path) -> bool:
    """Whether all of a checkpoint, or of a finished run, was written: its state is, which comes last."""
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
    checkpoint: str | Path, config: DominoConfig, args: DominoTrainingArguments, base: str | None = None
) -> None:
    """Refuse a checkpoint of another target, shape, optimizer or, under an adapter, of another drafter."""
    saved, run, target_of_adapter = (_read(Path(checkpoint) / name) for name in (CONFIG, RUN_FILE, TARGET_FILE))
    recorded = TargetIdentity.from_dict(target_of_adapter)
    if saved:
        recorded = TargetIdentity.recorded_in(DominoConfig.from_dict(saved))
    if found := TargetIdentity.recorded_in(config):
        check_same(recorded, found, str(checkpoint), START_AGAIN)
    own = {field.name for field in fields(config)} - {field.name for field in fields(DominoConfig)}
    shape = (*(field.name for field in fields(DrafterArguments)), *sorted(own))
    wanted = {name: getattr(config, name) for name in shape if hasattr(config, name)} | kept_of(args)
    wanted |= {"ema_decay": None, "lora_rank": None}  # of older versions
    if base is not None:
        wanted[BASE_DIGEST] = base
    for name, value in wanted.items():
        before = (saved | run).get(name, value)
        if before != value:
            made = f"{before!r}, with which {checkpoint} was trained"
            raise refusal(name, made, value, f"Set it back. {START_AGAIN}")


def kept_of(args: DominoTrainingArguments) -> dict[str, Any]:
    """What may not change in a run, for `run.json` beside a drafter that was saved."""
    values = {name: getattr(args, name) for name in KEPT}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def _read(path: Path) -> dict[str, Any]:
    if path.is_file():
        return read_object(path)
    return {}
