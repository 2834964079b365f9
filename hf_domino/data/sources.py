"""Where training text comes from: files, folders, and data sets of the Hub, as records with their places."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.data.records import RECORD_SUFFIXES, PlacedRecord, checked, read_records

# What a record may hold; other columns are not read, images least of all.
FIELDS = (
    "input_ids", "prompt_length", "loss_mask", "messages", "conversations", "tools", "prompt", "completion", "text",
)  # fmt: skip
FILE_KINDS = ".jsonl, .json, .parquet or text file"
SETTINGS_SUFFIX = ".settings.json"  # what the target wrote lies beside its settings


@dataclass(frozen=True)
class Source:
    """Records to read, and what they are known by.

    Args:
        name (`str`): For messages and progress bars.
        fingerprint (`Callable`): Digest of all the records.
        records (`Callable`): Yields records with their places, one at a time.
        texts (`tuple[Path, ...]`, *optional*, defaults to `()`): Files that are one text each, in place of records.
    """

    name: str
    fingerprint: Callable[[], str]
    records: Callable[[], Iterator[PlacedRecord]]
    texts: tuple[Path, ...] = ()


def from_files(paths: Sequence[str | Path]) -> Source:
    """Records of files: `.jsonl`, `.json` and `.parquet` hold records, any other is one text.

    Raises:
        FileNotFoundError: If there is no such file.
    """
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"no training file at {path}: pass a {FILE_KINDS}.")
    records = [path for path in files if path.suffix in RECORD_SUFFIXES]
    return Source(
        name=", ".join(map(str, files)),
        fingerprint=lambda: ", ".join(f"{path.suffix} {_digest(path)}" for path in files),
        records=lambda: itertools.chain.from_iterable(map(read_records, records)),
        texts=tuple(path for path in files if path not in records),
    )


def from_dataset(name: str, split: str | None = None, streaming: bool = False) -> Source:
    """Records of a data set by its name on the Hub, or of a folder.

    A folder is what `save_to_disk` wrote, or holds files of records as a data set on the Hub does.

    Args:
        name (`str`): Folder or Hub name, with `:config` behind it where a data set has several.
        split (`str`, *optional*): Defaults to the only one, or else to `train`.
        streaming (`bool`, *optional*, defaults to `False`): Read a data set of the Hub as it comes, without a copy of
            the whole on disk.

    Raises:
        ValueError: If there is no such data set, configuration or split.
    """
    folder = Path(name)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _from_saved(folder, split)
    import datasets

    path, _, config = (name, "", "") if folder.is_dir() else name.partition(":")
    with _told(name):
        builder = datasets.load_dataset_builder(path, config or None)
        files = {str(key): list(value) for key, value in (builder.config.data_files or {}).items()}
    chosen = _choose(split, list(files) or list(builder.info.splits or {}), name)
    # Files that are here and of our kinds are read by us, whose errors name the line.
    if chosen in files and all(Path(file).is_file() and Path(file).suffix in RECORD_SUFFIXES for file in files[chosen]):
        return from_files([file for file in files[chosen] if not file.endswith(SETTINGS_SUFFIX)])
    load = partial(datasets.load_dataset, path, config or None, split=chosen, streaming=streaming)
    # Names of files on the Hub hold the commit they are of.
    made_of = f"{name} {chosen} {builder.hash} {files.get(chosen)}"
    return Source(f"{name} ({chosen})", lambda: made_of, lambda: _placed(load, name, chosen))


def from_table(table: Any, name: str) -> Source:
    """Records of a `datasets.Dataset` or a list of records in this process."""
    return Source(
        name,
        lambda: str(getattr(table, "_fingerprint", id(table))),
        lambda: ((f"{name}[{index}]", checked(dict(record), name)) for index, record in enumerate(_narrow(table))),
    )


def _from_saved(folder: Path, split: str | None) -> Source:
    import datasets

    with _told(str(folder)):
        saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        chosen = _choose(split, list(saved), str(folder))
        return from_table(saved[chosen], f"{folder} ({chosen})")
    return from_table(saved, str(folder))


def _choose(split: str | None, names: Sequence[str], name: str) -> str:
    chosen = split or (names[0] if len(names) == 1 else "train")
    if chosen not in names:
        raise refusal(f"the split of {name}", f"one of {', '.join(names)}", chosen, "Set train_split or eval_split.")
    return chosen


def _placed(load: Callable[[], Any], name: str, split: str) -> Iterator[PlacedRecord]:
    with _told(name):
        yield from from_table(load(), f"{name} ({split})").records()


def _narrow(table: Any) -> Any:
    """The columns that records have; a list is left as it is."""
    columns = getattr(table, "column_names", None)
    known = [column for column in columns or () if column in FIELDS]
    return table.select_columns(known) if known else table


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Say in one line which data set it was that `datasets` could not load."""
    import datasets

    try:
        yield
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        expected = "a folder with a data set, or a name on the Hub (with :config behind it where it has several)"
        raise refusal("the data set", expected, name, f"datasets says: {error.__cause__ or error}") from error
