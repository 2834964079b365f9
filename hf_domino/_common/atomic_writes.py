"""Write files atomically, so that concurrent writers, a killed process or a full disk never leave a partial file."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from hf_domino._common.errors import invalid_argument

GB = 1e9
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # of a filesystem without locks
# torch.save reports every failed write with one of these messages, whatever the cause is.
FELL_SHORT = ("unexpected pos", "PytorchStreamWriter failed", "iostream error")
MAKE_ROOM = "What was there before is kept. Make room and run the same command again."


def check_writable(folder: Path, field: str) -> None:
    """Raise an error, before any work is done, if a folder cannot be created or written to."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    if not (place.is_dir() and os.access(place, os.W_OK) and _holds_files(place)):
        problem = "is read-only here" if place.is_dir() else "is a file"
        raise invalid_argument(
            field, "a folder that can be written to", str(folder), f"Choose another: {place} {problem}."
        )


def _holds_files(folder: Path) -> bool:
    """Return whether a file can be made in a folder, which the permissions alone do not say, as for root in /proc."""
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError as error:
        return error.errno in NO_ROOM


def why_no_room(error: BaseException) -> str | None:
    """Return the reason if an error reports a full disk, an exceeded quota or a file that is too large; else None."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in NO_ROOM else None
    message = str(error)
    for reason in map(os.strerror, NO_ROOM):
        if reason in message:
            return reason
    if any(words in message for words in FELL_SHORT):
        return "a write fell short"
    return None


@contextmanager
def needing_room(path: Path, way_out: str) -> Iterator[None]:
    """Turn errors about missing disk space into one readable `OSError`; other errors pass through unchanged."""
    try:
        yield
    except Exception as error:
        why = why_no_room(error)
        if why is None:
            raise
        place = next(place for place in path.absolute().parents if place.exists())
        room = f"{shutil.disk_usage(place).free / GB:.3g} GB are free in {place}."
        raise OSError(f"{path} could not be written: {why}. {room} {way_out}") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`, and rename it to `path` if the block ends without an error.

    The folder is created if needed.

    Example:
    ```python
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from hf_domino._common.atomic_writes import atomic_write
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "rows.txt")
    ...     with atomic_write(path) as aside:
    ...         _ = aside.write_text("all of it")
    ...         seen_before = path.exists()
    ...     seen_before, path.read_text()
    (False, 'all of it')

    ```
    """
    aside = path.with_name(f".{path.name}.part-{uuid.uuid4().hex[:12]}")
    aside.parent.mkdir(parents=True, exist_ok=True)
    try:
        with needing_room(path, MAKE_ROOM):
            yield aside
            _put(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _put(aside: Path, path: Path) -> None:
    """Rename a file to another; one that is mounted by itself, as into a container, is written over instead."""
    try:
        os.replace(aside, path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        shutil.copyfile(aside, path)


@contextmanager
def atomic_writes(folder: Path, *replaced: str) -> Iterator[Path]:
    """Yield a temporary folder, and move its files into `folder` if the block ends without an error.

    Args:
        folder (`Path`): The folder for the files, which is created if needed.
        replaced (`str`): Glob patterns of old files in `folder` to delete once the new files are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with needing_room(folder, MAKE_ROOM), TemporaryDirectory(prefix=".part-", dir=folder) as aside:
        yield Path(aside)
        written = set(os.listdir(aside))
        for name in sorted(written):
            os.replace(Path(aside, name), folder / name)
        for path in (path for pattern in replaced for path in folder.glob(pattern)):
            if path.name not in written:
                path.unlink()


def write_atomic(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_write(path) as aside:
        aside.write_text(text, encoding="utf-8")
