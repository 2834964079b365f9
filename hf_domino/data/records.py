"""Records of training files, each with its place for errors. Only a JSON list is in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from hf_domino._common.refusal import refusal

Record = dict[str, Any]
PlacedRecord = tuple[str, Record]  # where it stands, and what it is
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
CHUNK = 2**20  # characters that are read at once
PARQUET_ROWS = 256  # of wide rows too, a batch stays small


def read_records(path: Path) -> Iterator[PlacedRecord]:
    """Yield the records of a `.jsonl`, `.json` or `.parquet` file with their places; empty lines are skipped.

    Raises:
        ValueError: If something is no JSON object, or not UTF-8, or the file is no parquet file.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif path.suffix == ".json" and _first_character(path) == b"[":
        yield from _read_list(path)
    else:
        yield from _read_lines(path)


def read_text(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces that together are the text, cut where a line begins if there are lines.

    Raises:
        ValueError: If it is not UTF-8; the error names the line.
    """
    rest = ""
    with open_utf8(path) as file:
        while chunk := file.read(CHUNK):
            rest += chunk
            if len(chunk) == CHUNK:
                # Tokenizers of today do not join a line break with what follows it, nor a word with the space behind.
                cut = max(rest.rfind("\n") + 1, 0) or max(rest.rfind(" "), 0) or len(rest)
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


@contextmanager
def open_utf8(path: Path) -> Iterator[TextIO]:
    """Open a text file; what is not UTF-8 in it is an error that names the line."""
    with path.open(encoding="utf-8") as file:
        try:
            yield file
        except UnicodeDecodeError:
            with path.open("rb") as lines:  # once more, for the line
                for number, line in enumerate(lines, start=1):
                    _decode(line, f"{path}, line {number}")
            raise


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return next((line.lstrip()[:1] for line in file if line.strip()), b"")


def _read_lines(path: Path) -> Iterator[PlacedRecord]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            text = _decode(line, place)
            if text.strip():
                try:
                    yield place, checked(json.loads(text), place)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{place}: must be a JSON object, got {error}.") from error


def _read_list(path: Path) -> Iterator[PlacedRecord]:
    with open_utf8(path) as file:
        try:
            records = json.load(file)
        except json.JSONDecodeError as error:
            expected = "must be a JSON list of objects"
            raise ValueError(f"{path}, line {error.lineno}: {expected}, got {error.msg}.") from error
    for number, record in enumerate(records, start=1):
        place = f"{path}, item {number}"
        yield place, checked(record, place)


def _read_parquet(path: Path) -> Iterator[PlacedRecord]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        number = 0
        with ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", checked(record, str(path))
    except pyarrow.ArrowException as error:
        raise refusal(str(path), "a parquet file", str(error), "Write it again, or name it for what it is.") from error


def checked(record: Any, place: str) -> Record:
    """A record without the fields that are null, as columns of a table are where a record has no such field.

    Raises:
        ValueError: If it is no mapping.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be a JSON object, got {type(record).__name__}.")
    return {name: value for name, value in record.items() if value is not None}


def _decode(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} ({error.reason})"
        raise ValueError(f"{place}: must be UTF-8, got {found}: save the file as UTF-8.") from error
