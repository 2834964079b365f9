"""Files that are there whole or not at all: several processes may write them, one may be killed, a disk may be full."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hf_domino._common.refusal import refusal

GB = 1e9
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# torch.save says no more than that, whatever the reason.
FELL_SHORT = ("unexpected pos", "PytorchStreamWriter failed", "iostream error")
MAKE_ROOM = "What was there before is kept. Make room and run the same command again."


def check_writable(folder: Path, field: str) -> None:
    """Refuse a folder that can be neither made nor written to, before any work."""
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    if not (place.is_dir() and os.access(place, os.W_OK)):
        problem = "is read-only here" if place.is_dir() else "is a file"
        raise refusal(field, "a folder that can be written to", str(folder), f"Choose another: {place} {problem}.")


def why_no_room(error: BaseException) -> str | None:
    """Find what an error says of a full disk, a used-up quota or a limit on the size of files."""
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in NO_ROOM else None
    said = str(error)
    short = "a write fell short" if any(words in said for words in FELL_SHORT) else None
    return next((why for why in map(os.strerror, NO_ROOM) if why in said), short)


@contextmanager
def needing_room(path: Path, way_out: str) -> Iterator[None]:
    """Say in one sentence that there was no room for what is written inside; other errors pass."""
    try:
        yield
    except Exception as error:
        if (why := why_no_room(error)) is None:
            raise
        place = next(place for place in path.absolute().parents if place.exists())
        room = f"{shutil.disk_usage(place).free / GB:.3g} GB are free in {place}."
        raise OSError(f"{path} could not be written: {why}. {room} {way_out}") from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name beside `path`, in a folder that is made, whose file is `path` when the context ends without error.

    Example:
    ```python
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from hf_domino._common.whole_files import whole_file
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "rows.txt")
    ...     with whole_file(path) as aside:
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
def whole_files(folder: Path, *replaced: str) -> Iterator[Path]:
    """Give a folder whose files move into `folder` when the context ends without error; until then that is as it was.

    Args:
        folder (`Path`): Where the files go; it is made.
        replaced (`str`): Patterns of the files that they replace there, whatever those are called.
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


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")
