"""Records of training files: one JSON object each, with the place it stands at for errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the objects of a file of JSON lines or of a `.json` file with a list, each with its place.

    Args:
        path (`Path`): The file; empty lines are skipped.

    Raises:
        ValueError: If something is no JSON object, or not UTF-8.
    """
    if path.suffix == ".json" and read_text(path).lstrip().startswith("["):
        yield from _read_list(path)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(place, error) from error
            if text.strip():
                yield place, _load(text, place)


def read_text(path: Path) -> str:
    """The text of a file.

    Args:
        path (`Path`): The file.

    Raises:
        ValueError: If it is not UTF-8; the error names the line.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise _not_utf8(f"{path}, line {line}", error) from error


def _read_list(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        records = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: must be a JSON list of objects, got {error}.") from error
    for number, record in enumerate(records, start=1):
        place = f"{path}, item {number}"
        yield place, _checked(record, place)


def _load(text: str, place: str) -> Record:
    try:
        return _checked(json.loads(text), place)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: must be a JSON object, got {error}.") from error


def _checked(record: Any, place: str) -> Record:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be a JSON object, got {type(record).__name__}.")
    return record


def _not_utf8(place: str, error: UnicodeDecodeError) -> ValueError:
    found = error.object[error.start]
    return ValueError(f"{place}: must be UTF-8, got byte 0x{found:02x} ({error.reason}): save the file as UTF-8.")
