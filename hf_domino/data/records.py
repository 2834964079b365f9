"""Read records from files, folders and named data sets, each with its place for error messages."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils.sha import sha_fileobj

from hf_domino._common.errors import invalid_argument
from hf_domino.data.names import NAMES

Record = dict[str, Any]
PlacedRecord = tuple[str, Record]  # the place of the record, and the record
RECORD_SUFFIXES = (".jsonl", ".json", ".parquet")
PARQUET_ROWS = 256  # few enough to keep a batch of wide rows small
# The only columns of a table that are read; images, for example, are never loaded.
FIELDS = ("input_ids", "messages", "conversations", "prompt", "completion", "text", *NAMES)


@dataclass(frozen=True)
class Source:
    """Records to read, with a name for messages and a digest of all records."""

    name: str
    fingerprint: Callable[[], str | None]  # None if the records exist only in this process
    records: Callable[[], Iterator[PlacedRecord]]
    dataset: str | None = None  # name of the data set on the Hub


def check_file(path: Path, flag: str) -> None:
    """Raise an error that names the flag if its path is not a file of records."""
    if not path.is_file():
        found = "it is a folder" if path.is_dir() else "it does not exist"
        raise ValueError(f"{flag} must be a file of records, got {str(path)!r}: {found}.")


def from_files(paths: Sequence[str | Path]) -> Source:
    """Take records from `.jsonl`, `.json` and `.parquet` files."""
    files = [Path(path) for path in paths]
    for path in files:
        if path.is_dir():
            remedy = "Pass a folder to `from_dataset` of hf_domino.data.records."
            raise invalid_argument("files of records", "files", str(path), remedy)
        if not path.is_file():
            raise FileNotFoundError(f"the training file must exist, got {str(path)!r}: pass a file of records.")
        if path.suffix not in RECORD_SUFFIXES:
            remedy = 'Write one record per line, such as {"prompt": "..."} or {"text": "..."}, into a .jsonl file.'
            raise invalid_argument("files of records", f"of {', '.join(RECORD_SUFFIXES)}", str(path), remedy)
    return Source(
        ", ".join(map(str, files)),
        lambda: ", ".join(f"{path.suffix} {_digest(path)}" for path in files),
        lambda: itertools.chain.from_iterable(map(read_records, files)),
    )


def from_dataset(name: str, split: str | None = None, streaming: bool = False, field: str = "the data set") -> Source:
    """Take records from a data set: a folder of files, one that `save_to_disk` wrote, or `name:config` on the Hub.

    If there are several splits, the default is `train`. Streaming does not download the whole data set. Errors name
    `field`.
    """
    import datasets

    folder = Path(name)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        with _explained(name, field):
            saved = datasets.load_from_disk(name)
        if isinstance(saved, datasets.Dataset):
            return from_table(saved, name)
        chosen = _choose(split, list(saved), name)
        return from_table(saved[chosen], f"{name} ({chosen})")

    path = name
    config = ""
    if not folder.is_dir():
        path, _, config = name.partition(":")
    with _explained(name, field):
        builder = datasets.load_dataset_builder(path, config or None)
        files = {str(key): list(value) for key, value in (builder.config.data_files or {}).items()}
    chosen = _choose(split, list(files or builder.info.splits or ()), name)

    def records() -> Iterator[PlacedRecord]:
        with _explained(name, field):
            alone = None
            if folder.is_dir() and chosen in files:  # other splits of a folder can have other columns
                alone = {chosen: files[chosen]}
            table = datasets.load_dataset(path, config or None, data_files=alone, split=chosen, streaming=streaming)
            yield from from_table(table, f"{name} ({chosen})").records()

    # The names of files on the Hub contain their commit.
    made_of = f"{name} {chosen} {builder.hash} {files.get(chosen)}"
    return Source(f"{name} ({chosen})", lambda: made_of, records, None if folder.is_dir() else path)


def from_table(table: Any, name: str) -> Source:
    """Take records from a data set or a stream of `datasets` or torch, or from a list in memory.

    Their values may be tensors or arrays instead of lists.
    """
    is_table = hasattr(table, "column_names")

    def records() -> Iterator[PlacedRecord]:
        chosen = table
        if is_table and getattr(table, "format", {}).get("type") != "custom":  # a transform gives other columns
            columns = [column for column in table.column_names or () if column in FIELDS]
            chosen = (table.select_columns(columns) if columns else table).with_format(None)
        elif not hasattr(table, "__iter__"):  # one of torch, which need not end with an IndexError
            chosen = map(table.__getitem__, range(len(table)))
        for index, record in enumerate(chosen):
            plain = {field: _as_list(value) for field, value in record.items()}
            yield f"{name}[{index}]", _without_nulls(plain, name, is_table)

    return Source(name, lambda: getattr(table, "_fingerprint", None), records)


def read_records(path: Path) -> Iterator[PlacedRecord]:
    """Yield the records of a `.jsonl`, `.json` or `.parquet` file with their places, and skip empty lines."""
    read = {".parquet": _parquet, ".json": _json_list}.get(path.suffix, _json_lines)
    for place, record in read(path):
        yield place, _without_nulls(record, place, is_table=path.suffix == ".parquet")


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put the place of a record in front of error messages about it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with at(str(path)), path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                with at(f"line {number} must be a JSON object"):
                    record = json.loads(line)
                yield f"{path}, line {number}", record


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    with at(f"{path} must be a JSON list of objects (a file of lines is called .jsonl)"):
        records = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(records, list):
        records = [records]
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
        raise invalid_argument(
            str(path), "a parquet file", str(error), "Write it again, or give it the suffix of its real format."
        ) from error


def _without_nulls(record: Any, place: str, is_table: bool) -> Record:
    """Drop the null fields of a record; if it comes from a table, drop nested nulls, too.

    Tables use nulls for missing fields. Elsewhere, a nested null is part of the record, such as an argument of a tool
    call, so it stays.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{place}: must be a JSON object, got {type(record).__name__}.")
    if is_table:
        return _without_nested_nulls(record)
    return {name: value for name, value in record.items() if value is not None}


def _as_list(value: Any) -> Any:
    """Turn a tensor, an array or a tuple of numbers into a list of Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)) and any(hasattr(item, "tolist") for item in value):
        return [_as_list(item) for item in value]
    return list(value) if isinstance(value, tuple) else value


def _without_nested_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nested_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without_nested_nulls(item) for item in value]
    return value


def _choose(split: str | None, names: Sequence[str], name: str) -> str:
    default = names[0] if len(names) == 1 else "train"
    chosen = split or default
    if chosen not in names:
        raise invalid_argument(
            f"the split of {name}", f"one of {', '.join(names)}", chosen, "Set train_split or eval_split."
        )
    return chosen


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha_fileobj(file).hex()


@contextmanager
def _explained(name: str, field: str) -> Iterator[None]:
    """Turn errors of `datasets` into one line that names the data set."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        expected = "a folder with a data set, or a name on the Hub (followed by :config if it has several)"
        raise invalid_argument(field, expected, name, f"datasets says: {error.__cause__ or error}") from error
