"""Read the records of a source into a table of examples, and keep it in the cache of `datasets`, memory-mapped.

Shapes: R examples, T tokens of several concatenated examples.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import transformers

from hf_domino._common.atomic_writes import NO_LOCKS
from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino._common.version import __version__
from hf_domino.data.chat import UNALIGNABLE, Example
from hf_domino.data.encoding import encode_record
from hf_domino.data.names import Fields
from hf_domino.data.processes import call_in_processes
from hf_domino.data.records import PlacedRecord, Source, at
from hf_domino.data.row_counts import RowCounts

READ_AS = 4  # part of the cache's key: raise it when the same text gives other examples
ROWS_AT_ONCE = 1024
# How records become examples: the tokenizer, the variables of the chat template, `max_length` and `vocab_size`.
Reading = tuple[Any, Fields, int | None, int | None]


def read_rows(
    source: Source,
    tokenizer: Any,
    template_kwargs: Fields,
    max_length: int | None,
    vocab_size: int | None,
    max_rows: int | None,
    num_proc: int | None = None,
) -> tuple[Any, RowCounts]:
    """Read the examples of a source into a table, from the cache if it has them, and say what was left out."""
    reading = (tokenizer, template_kwargs, max_length, vocab_size)
    digest = source.fingerprint()
    if digest is None:
        counts = RowCounts()
        rows = _table(list(usable(itertools.islice(source.records(), max_rows), *reading, counts)))
    else:
        made_of = (source.name, digest, _description(tokenizer), max_length, vocab_size, max_rows, template_kwargs)
        rows, counts = _cached(made_of, source, reading, max_rows, num_proc)
    description = counts.describe()
    if len(rows) and description:
        notice(f"{source.name}: {description}")
    return rows, counts


def usable(
    records: Iterable[PlacedRecord],
    tokenizer: Any,
    template_kwargs: Fields,
    max_length: int | None,
    vocab_size: int | None,
    counts: RowCounts,
    most_seen: float = math.inf,
) -> Iterator[Example]:
    """Encode records, cut their examples to length, yield those that can be trained on, and count the others.

    Copies are counted of the first `most_seen` different examples, each of which is remembered by its hash.
    """
    seen: set[int] = set()
    for place, record in records:
        with at(place):
            rows = encode_record(record, tokenizer, template_kwargs)
        counts.records += 1
        for row in rows:
            most = max(row["input_ids"], default=0)
            if vocab_size is not None and most >= vocab_size:
                expected = f"token ids must be in [0, {vocab_size - 1}] (the target's vocab_size)"
                raise ValueError(f"{place}: {expected}, got {most}: use the target's own tokenizer.")
            ids = row["input_ids"][:max_length]
            mask = row["loss_mask"][:max_length]
            if row is UNALIGNABLE or not _has_anchor(mask):
                counts.unaligned += row is UNALIGNABLE
                counts.without_anchor += row is not UNALIGNABLE
                counts.first_left_out = counts.first_left_out or place
                continue
            digest = hash(tuple(ids))
            counts.rows += 1
            counts.tokens += len(ids)
            counts.cut += len(ids) < len(row["input_ids"])
            counts.copies += digest in seen
            if len(seen) < most_seen:
                seen.add(digest)
            yield {"input_ids": ids, "loss_mask": mask}


def _description(tokenizer: Any) -> str:
    """Describe everything about a tokenizer that changes how it encodes a record."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = repr(tokenizer) if backend is None else backend.to_str()
    special = getattr(tokenizer, "special_tokens_map", None)  # a chat template can render each of them
    return f"{text} {special} {getattr(tokenizer, 'chat_template', None)}"


def _has_anchor(loss_mask: Sequence[int]) -> bool:
    """Return whether two neighbouring tokens are supervised, which a block needs."""
    return any(first and second for first, second in itertools.pairwise(loss_mask))


def _columns() -> Any:
    from datasets import Features, List, Value

    return Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("int8"))})


def _table(rows: Sequence[Example]) -> Any:
    """Put examples into a table in memory."""
    import datasets

    columns = _columns()
    return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in columns}, features=columns)


def _cached(
    made_of: tuple[Any, ...], source: Source, reading: Reading, max_rows: int | None, num_proc: int | None
) -> tuple[Any, RowCounts]:
    """Read memory-mapped examples from the cache of `datasets`; the first process writes it while the others wait.

    With `num_proc`, that many new processes each encode a stretch of the records. The examples and their order stay
    the same.
    """
    from datasets import Features, Value, concatenate_datasets
    from datasets.fingerprint import Hasher

    digest = Hasher.hash((*made_of, READ_AS, __version__, transformers.__version__))
    stretches = [Stretch(digest, source, reading, 0, max_rows)]
    if num_proc is not None and num_proc > 1:
        total = sum(1 for _ in itertools.islice(source.records(), max_rows))
        size = max(1, -(-total // num_proc))
        ranges = [(start, min(start + size, total)) for start in range(0, total, size)]
        if len(ranges) > 1:
            stretches = [Stretch(f"{digest}-{start}-{end}", source, reading, start, end) for start, end in ranges]
            # This table lists stretches that are in the cache. Processes only start if the table itself is not there.
            columns = Features({"stretch": Value("string")})
            _from_cache(f"{digest}-in-{len(ranges)}", _encode_in_processes, columns, stretches=tuple(stretches))
    tables = [encode(stretch) for stretch in stretches]
    counts = RowCounts.sum(RowCounts(**json.loads(table[-1]["counts"])) for table in tables)
    parts = [table.select(range(len(table) - 1)).remove_columns("counts") for table in tables]
    if len(parts) == 1:
        return parts[0], counts
    rows = concatenate_datasets(parts)
    texts = (text for flat, lengths in token_batches(rows) for text in np.split(flat, lengths.cumsum()[:-1]))
    counts.copies = len(rows) - len({hash(text.tobytes()) for text in texts})  # also across stretches
    return rows, counts


@dataclass(frozen=True)
class Stretch:
    """Neighbouring records of a source, from `start` to before `end`, and the name of their examples in the cache."""

    fingerprint: str
    source: Source
    reading: Reading
    start: int
    end: int | None


def encode(stretch: Stretch) -> Any:
    """Return the table of a stretch's examples, encoded here if they are not in the cache; its last row has counts."""
    from datasets import Value

    columns = _columns()
    columns["counts"] = Value("string")
    return _from_cache(stretch.fingerprint, _generate, columns, stretch=stretch)


def _from_cache(fingerprint: str, generate: Callable[..., Iterator[Fields]], columns: Any, **arguments: Any) -> Any:
    """Read a table from the cache of `datasets`; if it is not there, generate it."""
    import datasets
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return Dataset.from_generator(generate, columns, fingerprint=fingerprint, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None  # the cause names the record
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        remedy = "Set HF_DATASETS_CACHE to a folder on another one."
        place = str(datasets.config.HF_DATASETS_CACHE)
        raise invalid_argument("the cache of datasets", "on a filesystem with locks", place, remedy) from error


def _generate(stretch: Stretch) -> Iterator[Fields]:
    """Yield the examples of a stretch of records, and after them a row with their counts."""
    counts = RowCounts()
    records = itertools.islice(stretch.source.records(), stretch.start, stretch.end)
    yield from usable(records, *stretch.reading, counts)
    # Counts are complete only after the examples, so an additional row without tokens stores them.
    yield {"input_ids": [], "loss_mask": [], "counts": json.dumps(asdict(counts))}


def _encode_in_processes(stretches: tuple[Stretch, ...]) -> Iterator[Fields]:
    """Encode each stretch in a process of its own, which leaves the examples in the cache, and yield its name there."""
    for stretch, code in zip(stretches, call_in_processes(encode, stretches), strict=True):
        if code:
            encode(stretch)  # if a record ended the process, this raises the error that names it
            notice(f"A process that encoded records ended with code {code}, so this process encoded its records again.")
        yield {"stretch": stretch.fingerprint}


def token_batches(rows: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the concatenated token ids `[T]` of several examples of a table at a time, with their lengths `[R]`."""
    for batch in rows.with_format("arrow").iter(ROWS_AT_ONCE):
        ids = batch["input_ids"].combine_chunks()
        yield ids.flatten().to_numpy(), ids.value_lengths().to_numpy()
