"""One run at a time in an `output_dir`: a second one would take a checkpoint that is being written for a dead run's."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accelerate.utils import broadcast_object_list
from filelock import FileLock, SoftFileLock, Timeout
from transformers import TrainingArguments

from hf_domino._common.refusal import refusal

LOCK_FILE = "_run.lock"  # uploads of a trainer leave out names that start so


@contextmanager
def alone_in_folder(args: TrainingArguments) -> Iterator[None]:
    """Hold `output_dir` for this run; the operating system lets go of it when the process dies, however it dies.

    Args:
        args (`TrainingArguments`): Of the run. Its first process holds the folder for all of them, and may do so again
            inside.

    Raises:
        ValueError: If another run holds the folder; on every process.
    """
    folder = Path(str(args.output_dir))
    with ExitStack() as held:
        holder = [_take(folder, held) if args.process_index == 0 else None]
        broadcast_object_list(holder)
        if holder[0] is not None:
            remedy = f"{holder[0]} holds it. Choose another output_dir, or end that run."
            raise refusal("output_dir", "a folder in which no other run is at work", str(folder), remedy)
        yield


def _take(folder: Path, held: ExitStack) -> str | None:
    """Hold a folder until `held` is closed, and return None; or who holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / LOCK_FILE
    lock = FileLock(path, timeout=0, is_singleton=True)
    is_outermost = not lock.is_locked
    written = path.read_text(encoding="utf-8").split()[:2] if path.is_file() else None
    try:
        held.enter_context(lock)
    except Timeout:
        return f"Process {' on '.join(written)}" if written else "Another process"
    # A soft lock, for disks that know no other, has this record itself.
    if is_outermost and not isinstance(lock, SoftFileLock):
        held.callback(_delete, path)  # before it is let go of: after that it may be the next run's
        with suppress(OSError):
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n", encoding="utf-8")
    return None


def _delete(path: Path) -> None:
    with suppress(OSError):  # where an open file cannot be deleted, it stays and means nothing
        path.unlink()
