"""Write files atomically, because several processes may write them, one may be killed, or a disk may be full."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_domino._common.errors import invalid_argument

GB = 1e9
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch.save reports every failed write by one of these.
FELL_SHORT = ("unexpected pos", "PytorchStreamWriter failed", "iostream error")
MAKE_ROOM = "What was there before is kept. Make room and run the same command again."


def check_writable(folder: Path, field: str) -> None:
    """Raise an error before any work if a folder can be neither made nor written to."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    if not (place.is_dir() and os.access(place, os.W_OK)):
        problem = "is read-only here" if place.is_dir() else "is a file"
        raise invalid_argument(
            field, "a folder that can be written to", str(folder), f"Choose another: {place} {problem}."
        )


def why_no_room(error: BaseException) -> str | None:
    """Return whether an error reports a full disk, a used-up quota or a file that is too large, in words, or None."""
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
    """Turn errors about missing disk space into one sentence; other errors pass unchanged."""
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
    """Yield a name beside `path`, whose file becomes `path` when the context ends without error; the folder is made.

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
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_writes(folder: Path, *replaced: str) -> Iterator[Path]:
    """Yield a folder whose files move into `folder` when the context ends without error, which until then stays as is.

    Args:
        folder (`Path`): The folder for the files, which is made.
        replaced (`str`): Patterns of files in `folder` that the new files replace, whatever their names are.
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
