"""Rows as Arrow tables: sifted, written once to a cache, and read memory-mapped.

A row is five bytes a token on disk (int32 ids, int8 loss mask), and takes memory only while it is looked at.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from tqdm.auto import tqdm

from hf_domino import __version__
from hf_domino._common.whole_files import whole_file, write_whole
from hf_domino.data.chat import UNTOLD
from hf_domino.data.counts import RowCounts
from hf_domino.data.encoding import PlacedRow, Row

ROWS_FILE, COUNTS_FILE = "rows.arrow", "counts.json"
ROWS_PER_BATCH = 256
SECONDS_UNSHOWN = 5  # short work needs no bar


class Sieve:
    """Cuts rows, leaves out those of no use, and counts, as [`load_rows`] is asked to."""

    def __init__(self, max_length: int, as_prompts: bool = False, drop_duplicates: bool = False):
        self.max_length, self.as_prompts, self.drop_duplicates = max_length, as_prompts, drop_duplicates
        self.counts = RowCounts()
        self._seen: set[bytes] = set()

    def sift(self, rows: Iterable[PlacedRow]) -> Iterator[Row]:
        """Yield the rows of use, cut."""
        for place, row in rows:
            length = len(row["input_ids"])
            cut = {name: values[: self.max_length] for name, values in row.items()}
            reason = "untold" if row is UNTOLD else self._reason(cut, length)
            is_kept_copy = reason == "duplicates" and not self.drop_duplicates
            if reason is None or is_kept_copy:
                kept = len(cut["input_ids"])
                self._count(rows=1, tokens=kept, cut=int(kept < length), copies=int(is_kept_copy))
                yield cut
            else:
                self._count(**{reason: 1})
                if self.counts.first_left_out is None:
                    self.counts = replace(self.counts, first_left_out=place)

    def read(self) -> None:
        """Count a record that is read."""
        self._count(records=1)

    def _reason(self, row: Row, length: int) -> str | None:
        """Why a row is left out, copies where they are to be, or None."""
        if self.as_prompts and 1 not in row["loss_mask"] and length >= self.max_length:
            return "too_long"
        if not (row["input_ids"] if self.as_prompts else has_anchor(row["loss_mask"])):
            return "without_anchor"
        digest = hashlib.blake2b(json.dumps(row["input_ids"]).encode(), digest_size=16).digest()
        if digest in self._seen:
            return "duplicates"
        self._seen.add(digest)
        return None

    def _count(self, **more: int) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})


def has_anchor(loss_mask: list[int]) -> bool:
    """Whether two neighbouring tokens are supervised, which a block needs."""
    return any(first and second for first, second in itertools.pairwise(loss_mask))


def cached_table(fingerprint: str, rows: Callable[[], Iterable[Row]], sieve: Sieve, name: str) -> tuple[Any, RowCounts]:
    """Rows, memory-mapped, from the cache or written to it: by one process, while others that want the same wait."""
    from datasets import Dataset, config
    from filelock import FileLock

    digest = hashlib.sha256("\n".join([fingerprint, _code(), __version__, transformers.__version__]).encode())
    # Beside the caches of `datasets`, which HF_DATASETS_CACHE moves; safe to delete.
    folder = Path(config.HF_DATASETS_CACHE) / "hf_domino" / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / COUNTS_FILE).is_file():
            with whole_file(folder / ROWS_FILE) as aside, aside.open("wb") as file:
                _write(tqdm(rows(), f"rows of {name}", unit="row", delay=SECONDS_UNSHOWN), file)
            # Last: where the counts are, the rows are.
            write_whole(folder / COUNTS_FILE, json.dumps(asdict(sieve.counts)))
    counted = RowCounts(**json.loads((folder / COUNTS_FILE).read_text(encoding="utf-8")))
    return Dataset.from_file(str(folder / ROWS_FILE)), counted


def table_in_memory(rows: Iterable[Row]) -> Any:
    """Rows as a table in memory, five bytes a token too."""
    import pyarrow
    from datasets import Dataset

    sink = pyarrow.BufferOutputStream()
    _write(rows, sink)
    return Dataset.from_buffer(sink.getvalue())


def _write(rows: Iterable[Row], sink: Any) -> None:
    import pyarrow

    ids, mask = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.int8())
    schema = pyarrow.schema({"input_ids": ids, "loss_mask": mask})
    remaining = iter(rows)
    with pyarrow.ipc.new_stream(sink, schema) as writer:
        while batch := list(itertools.islice(remaining, ROWS_PER_BATCH)):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema=schema))


@cache
def _code() -> str:
    """Digest of the code that reads and encodes: where it changes, what is in the cache is of the past."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
