"""Files that are there whole or not at all, also where several processes write them or one is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a name beside `path` to write under; what was written there is `path` when the context ends without error.

    Args:
        path (`Path`): The file, replaced where there is one.

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
    aside = path.with_name(f".{path.name}.part-{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Args:
        path (`Path`): The file.
        text (`str`): What it is to hold.
    """
    with whole_file(path) as aside:
        aside.write_text(text, encoding="utf-8")
