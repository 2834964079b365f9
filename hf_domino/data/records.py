"""Records of files, folders and data sets by name, each with its place for errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import sha_fileobj

from hf_domino._common.refusal import refusal
from hf_domino.data.names import NAMES

Record = dict[str, Any]
PlacedRecord = tuple[str, Record]  # where it stands, and the record
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
PARQUET_ROWS = 256  # of wide rows too, a batch stays small
# Columns that are read of a table; images least of all.
FIELDS = ("input_ids", "messages", "conversations", "prompt", "completion", "text", *NAMES)


@dataclass(frozen=True)
class Source:
    """Records to read: a name for messages, a digest of all of them, and the records."""

    name: str
    fingerprint: Callable[[], str | None]  # None where what is read is known to this process alone
    records: Callable[[], Iterator[PlacedRecord]]


def check_file(path: Path, flag: str) -> None:
    """Refuse what is no file of records, by the flag that names it."""
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "there is none of that name"
        raise ValueError(f"{flag} must be a file of records, got {str(path)!r}: {found}.")


def from_files(paths: Sequence[str | Path]) -> Source:
    """Take records from `.jsonl`, `.json` and `.parquet` files."""
    files = [Path(path) for path in paths]
    for path in files:
        if path.is_dir():
            remedy = "Give a folder to `from_dataset` of hf_domino.data.records."
            raise refusal("files of records", "files", str(path), remedy)
        if not path.is_file():
            raise FileNotFoundError(f"no training file at {path}: pass one with records.")
        if path.suffix not in RECORD_SUFFIXES:
            remedy = 'Write one record a line, such as {"prompt": "..."} or {"text": "..."}, into a .jsonl file.'
            raise refusal("files of records", f"of {', '.join(RECORD_SUFFIXES)}", str(path), remedy)
    return Source(
        ", ".join(map(str, files)),
        lambda: ", ".join(f"{path.suffix} {_digest(path)}" for path in files),
        lambda: itertools.chain.from_iterable(map(read_records, files)),
    )


def from_dataset(name: str, split: str | None = None, streaming: bool = False, field: str = "the data set") -> Source:
    """Take records from a data set: a folder of files, one that `save_to_disk` wrote, or `name:config` of the Hub.

    The split is the only one, or else `train`. Streaming makes no copy of the whole on disk. `field` stands in errors.
    """
    import datasets

    folder = Path(name)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        with _told(name, field):
            saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.Dataset):
            return from_table(saved, name)
        chosen = _choose(split, list(saved), name)
        return from_table(saved[chosen], f"{name} ({chosen})")

    path, _, config = (name, "", "") if folder.is_dir() else name.partition(":")
    with _told(name, field):
        builder = datasets.load_dataset_builder(path, config or None)
        files = {str(key): list(value) for key, value in (builder.config.data_files or {}).items()}
    chosen = _choose(split, list(files or builder.info.splits or ()), name)

    def records() -> Iterator[PlacedRecord]:
        with _told(name, field):
            # Of a folder that split alone is read: others may have other columns.
            alone = {chosen: files[chosen]} if folder.is_dir() and chosen in files else None
            table = datasets.load_dataset(path, config or None, data_files=alone, split=chosen, streaming=streaming)
            yield from from_table(table, f"{name} ({chosen})").records()

    # Names of files on the Hub hold the commit they are of.
    made_of = f"{name} {chosen} {builder.hash} {files.get(chosen)}"
    return Source(f"{name} ({chosen})", lambda: made_of, records)


def from_table(table: Any, name: str) -> Source:
    """Take records from a `datasets.Dataset` or a list in this process."""
    is_table = hasattr(table, "column_names")

    def records() -> Iterator[PlacedRecord]:
        known = [column for column in getattr(table, "column_names", None) or () if column in FIELDS]
        for index, record in enumerate(table.select_columns(known) if known else table):
            yield f"{name}[{index}]", _without_nulls(dict(record), name, is_table)

    return Source(name, lambda: getattr(table, "_fingerprint", None), records)


def read_records(path: Path) -> Iterator[PlacedRecord]:
    """Yield the records of a `.jsonl`, `.json` or `.parquet` file with their places; empty lines are skipped."""
    if path.suffix == ".parquet":
        placed = _parquet(path)
    elif path.suffix == ".json":
        placed = _json_list(path)
    else:
        placed = _json_lines(path)
    for place, record in placed:
        yield place, _without_nulls(record, place, is_table=path.suffix == ".parquet")


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put the place of a record in front of errors about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with at(str(path)), path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                with at(f"line {number} must be a JSON object"):
                    record = json.loads(line)
                yield f"{path}, line {number}", record


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    with at(f"{path} must be a JSON list of objects (a file of lines is called .jsonl)"):
        records = json.loads(path.read_text(encoding="utf-8"))
    for number, record in enumerate(records, start=1):
        yield f"{path}, item {number}", record


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            records = (record for batch in file.iter_batches(PARQUET_ROWS) for record in batch.to_pylist())
            for number, record in enumerate(records, start=1):
                yield f"{path}, row {number}", record
    except pyarrow.ArrowException as error:
        raise refusal(str(path), "a parquet file", str(error), "Write it again, or name it for what it is.") from error


def _without_nulls(record: Any, place: str, is_table: bool) -> Record:
    """Drop the fields of a record that are null, and all nulls of a table, which fills them in for missing fields.

    Elsewhere a null inside a field was written by somebody, such as an argument of a tool call, and stays.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be a JSON object, got {type(record).__name__}.")
    return _dropped(record) if is_table else {name: value for name, value in record.items() if value is not None}


def _dropped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dropped(item) for name, item in value.items() if item is not None}
    is_of_objects = isinstance(value, list) and value and isinstance(value[0], dict)
    return [_dropped(item) for item in value] if is_of_objects else value


def _choose(split: str | None, names: Sequence[str], name: str) -> str:
    chosen = split or (names[0] if len(names) == 1 else "train")
    if chosen not in names:
        raise refusal(f"the split of {name}", f"one of {', '.join(names)}", chosen, "Set train_split or eval_split.")
    return chosen


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


@contextmanager
def _told(name: str, field: str) -> Iterator[None]:
    """Say in one line which data set `datasets` cannot load."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        expected = "a folder with a data set, or a name on the Hub (with :config behind it where it has several)"
        raise refusal(field, expected, name, f"datasets says: {error.__cause__ or error}") from error
