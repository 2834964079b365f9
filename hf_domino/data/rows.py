"""Read training examples into a `RowDataset`, from files, folders, data sets and lists.

A row is one example, `{"input_ids": [...], "loss_mask": [...]}`, which takes five bytes per token in a table of
`datasets`. Examples from files are tokenized once, stored on disk and memory-mapped.

Shapes: V tokens of the target, R examples, T tokens of several concatenated examples.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hf_domino._common.notices import notice
from hf_domino._common.version import __version__
from hf_domino.data.chat import UNALIGNABLE, Example
from hf_domino.data.encoding import encode_record
from hf_domino.data.names import Fields
from hf_domino.data.records import PlacedRecord, Source, at, from_files, from_table

READ_AS = 3  # part of the cache's key: raise it when the same text gives other examples
ROWS_AT_ONCE = 1024
# How records become examples: the tokenizer, the variables of the chat template, `max_length` and `vocab_size`.
Reading = tuple[Any, Fields, int | None, int | None]
NONE_LEFT = (
    "rows must hold at least one with two neighbouring tokens to learn, got none in {0} rows: raise max_length, or "
    "check the loss masks. {1}"
)
# Field of the counts -> the reason why such examples are left out.
REASONS = {
    "without_anchor": "without two neighbouring supervised tokens (raise max_length if they were cut, or check where "
    "the loss falls)",
    "unaligned": "assistant turns that do not begin as the chat template asks for them, as with thinking where it is "
    "off (set --chat-template-kwargs to the mode of the text)",
}


@dataclass
class RowCounts:
    """Counts the records that were read, and the examples that were kept or left out.

    Args:
        records (`int`, *optional*, defaults to 0): Records that were read.
        rows (`int`, *optional*, defaults to 0): Examples that were kept.
        tokens (`int`, *optional*, defaults to 0): Tokens of the kept examples.
        cut (`int`, *optional*, defaults to 0): Kept examples that were cut at the maximum length.
        copies (`int`, *optional*, defaults to 0): Kept examples that are equal to an earlier one.
        without_anchor (`int`, *optional*, defaults to 0): Examples left out because no two neighbouring tokens are
            supervised.
        unaligned (`int`, *optional*, defaults to 0): Examples left out because their assistant turn does not begin with
            the generation prompt of the chat template.
        first_left_out (`str`, *optional*): The place of the first example that was left out.
    """

    records: int = 0
    rows: int = 0
    tokens: int = 0
    cut: int = 0
    copies: int = 0
    without_anchor: int = 0
    unaligned: int = 0
    first_left_out: str | None = None

    @classmethod
    def sum(cls, parts: Iterable[RowCounts]) -> RowCounts:
        """Add the counts of consecutive stretches of records."""
        total = cls()
        for part in parts:
            for field in fields(cls):
                if field.name != "first_left_out":
                    setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
            total.first_left_out = total.first_left_out or part.first_left_out
        return total

    @property
    def left_out(self) -> int:
        """Number of examples that were left out, for whatever reason."""
        return sum(getattr(self, name) for name in REASONS)

    def describe(self) -> str:
        """Describe how many examples were left out or cut, and why; empty if there are none.

        Example:
        ```python
        >>> from hf_domino.data import RowCounts
        >>> RowCounts(records=5, rows=5, cut=1).describe()
        '1 of 5 rows are cut at max_length.'

        ```
        """
        said = []
        if self.left_out:
            reasons = [f"{getattr(self, name)} {why}" for name, why in REASONS.items() if getattr(self, name)]
            first = ""
            if self.first_left_out:
                first = f", the first is {self.first_left_out}"
            total = self.left_out + self.rows
            said.append(f"{self.left_out} of {total} rows are left out{first}: {'; '.join(reasons)}.")
        if self.cut:
            said.append(f"{self.cut} of {self.rows} rows are cut at max_length.")
        if self.copies:
            said.append(f"{self.copies} of {self.rows} rows are equal to an earlier one.")
        return " ".join(said)


class RowDataset(Dataset):
    """Examples of token ids and loss masks, ready for [`DominoTrainer`].

    Args:
        rows (`Sequence[dict]`): A list or a `datasets.Dataset` of records with `input_ids`, which are read like the
            records of a file in [`load_rows`]: `loss_mask` and the other masks say what is learned, and padding is
            dropped. Examples without two neighbouring supervised tokens have no anchor and are left out; a notice
            counts them.
        counts (`RowCounts`, *optional*): Counts of `rows` that were read already, a `datasets.Dataset` of `input_ids`
            and `loss_mask`. Without them, the rows are read here.

    Attributes:
        rows (`datasets.Dataset`): The examples, memory-mapped if they were read from files.
        counts (`RowCounts`): How many examples there are, and how many were left out and why.

    Raises:
        ValueError: If a record is malformed, or no example is left.
    """

    def __init__(self, rows: Any, counts: RowCounts | None = None):
        if counts is None:
            rows, counts = _read(from_table(rows, "rows"), None, {}, None, None, None)
        self.rows = rows
        self.counts = counts
        if not len(rows):
            raise ValueError(NONE_LEFT.format(counts.left_out, counts.describe()).rstrip())

    def within(self, max_length: int, vocab_size: int | None = None, name: str = "rows") -> RowDataset:
        """Return the examples cut at `max_length`, after checking that their ids are below `vocab_size`.

        Args:
            max_length (`int`): Longest example, in tokens.
            vocab_size (`int`, *optional*): Vocabulary size of the target. Defaults to no limit.
            name (`str`, *optional*, defaults to `"rows"`): Name of the examples, for messages.
        """
        limit = math.inf if vocab_size is None else vocab_size
        fits = all(ids.max(initial=0) < limit and max(sizes) <= max_length for ids, sizes in self.token_batches())
        return self if fits else load_rows(from_table(self.rows, name), None, max_length, vocab_size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.rows[index]

    def token_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over the concatenated token ids `[T]` of several examples with the lengths `[R]` of these."""
        return _token_batches(self.rows)


def _token_batches(rows: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in rows.with_format("arrow").iter(ROWS_AT_ONCE):
        ids = batch["input_ids"].combine_chunks()
        yield ids.flatten().to_numpy(), ids.value_lengths().to_numpy()


def load_rows(
    path: str | Path | Sequence[str | Path] | Source,
    tokenizer: Any = None,
    max_length: int = 2048,
    vocab_size: int | None = None,
    max_rows: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
) -> RowDataset:
    """Read and tokenize training files or a data set; the examples are kept in the cache of `datasets`.

    A `.jsonl` file has one object per line, a `.json` file has a list of objects, and a `.parquet` file has one object
    per row. An object has `text`, or `prompt` and `completion` (strings or messages; loss on the completion), or
    `messages` or `conversations` (loss on the assistant's tokens), or `input_ids` with `prompt_length` or `loss_mask`
    (which [`write_data`] writes). Examples are cut at `max_length`. Some other fields change the loss or the prompt;
    `NAMES` of `hf_domino.data.names` lists them, and says which are read and which are errors.

    Args:
        path (`str`, `Path`, a list of these, or `Source`): File or files, or the result of
            [`~data.records.from_dataset`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer; only records with `input_ids` do not
            need it.
        max_length (`int`, *optional*, defaults to 2048): Longest example, in tokens.
        vocab_size (`int`, *optional*): Vocabulary size of the target; a token id that reaches it is an error. Defaults
            to no limit.
        max_rows (`int`, *optional*): Maximum number of records to read, starting with the first. Defaults to all.
        chat_template_kwargs (`Mapping`, *optional*): Variables for the chat template, such as
            `{"enable_thinking": False}`.
        num_proc (`int`, *optional*): Number of processes that encode the records of files and of a `datasets.Dataset`.
            Defaults to one.

    Returns:
        `RowDataset`: The examples, with the numbers of those that were left out in `counts`.

    Raises:
        ValueError: If a record is malformed, or no example can be trained on.
        FileNotFoundError: If a file does not exist.
    """
    if not isinstance(path, Source):
        paths = [path] if isinstance(path, (str, Path)) else path
        path = from_files(paths)
    template_kwargs = dict(chat_template_kwargs or {})
    return RowDataset(*_read(path, tokenizer, template_kwargs, max_length, vocab_size, max_rows, num_proc))


class RowStream(IterableDataset):
    """Examples of a data set without a length, read in each pass as [`load_rows`] reads the records of a file.

    Args:
        dataset (`IterableDataset`): A stream of `datasets`, or an iterable data set of torch, of records.
        name (`str`): Its name, for messages.
        tokenizer, max_length, vocab_size, chat_template_kwargs (*optional*): As for [`load_rows`].
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        tokenizer: Any = None,
        max_length: int = 2048,
        vocab_size: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        self.dataset = dataset
        self.name = name
        self._reading = (tokenizer, dict(chat_template_kwargs or {}), max_length, vocab_size)
        self._was_described = False

    def __iter__(self) -> Iterator[Example]:
        counts = RowCounts()
        yield from _usable(from_table(self.dataset, self.name).records(), *self._reading, counts)
        description = counts.describe()
        if counts.records and not counts.rows and get_worker_info() is None:
            raise ValueError(f"{self.name}: {NONE_LEFT.format(counts.left_out, description)}".rstrip())
        if description and not self._was_described:
            notice(f"{self.name}: {description}")
        self._was_described = True

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which pass over it begins, for its order."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)


def encode_dataset(dataset: Any, name: str, **options: Any) -> Any:
    """Read a data set, a stream, a list or a dictionary of them in the same way as the records of a file.

    Examples that were read already, by [`load_rows`] or with hidden states, are only cut to length.

    Args:
        dataset: What to read; None is returned unchanged.
        name (`str`): Its name, for messages.
        options: Arguments of [`load_rows`], of which `max_length` and `vocab_size` must be given.
    """
    if dataset is None or isinstance(dataset, RowStream):
        return dataset
    if isinstance(dataset, dict):
        return {key: encode_dataset(value, f"{name}[{key!r}]", **options) for key, value in dataset.items()}
    if hasattr(dataset, "within"):
        return dataset.within(options["max_length"], options["vocab_size"], name)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        options.pop("num_proc", None)
        return RowStream(dataset, name, **options)
    if len(dataset) and "hidden_states" in dataset[0]:  # a part of such examples, which are read in their own way
        return dataset
    return load_rows(from_table(dataset, name), **options)


def _read(
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
        rows = _table(list(_usable(itertools.islice(source.records(), max_rows), *reading, counts)))
    else:
        made_of = (source.name, digest, _description(tokenizer), max_length, vocab_size, max_rows, template_kwargs)
        rows, counts = _cached(made_of, source, reading, max_rows, num_proc)
    description = counts.describe()
    if len(rows) and description:
        notice(f"{source.name}: {description}")
    return rows, counts


def _usable(
    records: Iterable[PlacedRecord],
    tokenizer: Any,
    template_kwargs: Fields,
    max_length: int | None,
    vocab_size: int | None,
    counts: RowCounts,
) -> Iterator[Example]:
    """Encode records, cut their examples to length, yield those that can be trained on, and count the others."""
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
            seen.add(digest)
            yield {"input_ids": ids, "loss_mask": mask}


def _description(tokenizer: Any) -> str:
    """Describe everything about a tokenizer that changes how it encodes a record."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = repr(tokenizer) if backend is None else backend.to_str()
    return f"{text} {getattr(tokenizer, 'eos_token_id', None)} {getattr(tokenizer, 'chat_template', None)}"


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

    With `num_proc`, each of so many processes encodes a stretch of the records. The examples are the same, and so is
    their order.
    """
    from datasets import Dataset, Value, concatenate_datasets
    from datasets.exceptions import DatasetGenerationError
    from datasets.fingerprint import Hasher

    columns = _columns()
    columns["counts"] = Value("string")
    options: dict[str, Any] = {}
    stretches: list[tuple[int, int | None]] = [(0, max_rows)]
    if num_proc is not None and num_proc > 1:
        total = sum(1 for _ in itertools.islice(source.records(), max_rows))
        size = max(1, -(-total // num_proc))
        stretches = [(start, min(start + size, total)) for start in range(0, total, size)] or stretches
        options["num_proc"] = len(stretches)
    options["gen_kwargs"] = {"source": source, "reading": reading, "stretches": stretches}
    digest = Hasher.hash((*made_of, READ_AS, __version__, transformers.__version__))
    try:
        table = Dataset.from_generator(_generate, columns, fingerprint=digest, **options)
    except DatasetGenerationError as error:
        if "num_proc" in options:  # the error of another process has lost its cause, so the record is read again here
            for _ in _generate(**options["gen_kwargs"]):
                pass
        raise error.__cause__ or error from None  # the cause names the record
    ends = np.flatnonzero(table.data["counts"].is_valid().to_numpy()).tolist()
    starts = (0, *(end + 1 for end in ends[:-1]))
    counts = RowCounts.sum(RowCounts(**json.loads(table[end]["counts"])) for end in ends)
    parts = [table.select(range(start, end)).remove_columns("counts") for start, end in zip(starts, ends, strict=True)]
    if len(parts) == 1:
        return parts[0], counts
    rows = concatenate_datasets(parts)
    texts = (text for flat, lengths in _token_batches(rows) for text in np.split(flat, lengths.cumsum()[:-1]))
    counts.copies = len(rows) - len({hash(text.tobytes()) for text in texts})  # also those of another stretch
    return rows, counts


def _generate(source: Source, reading: Reading, stretches: list[tuple[int, int | None]]) -> Iterator[Fields]:
    """Yield the examples of some stretches of records, after each of them a row with their counts."""
    for start, end in stretches:
        counts = RowCounts()
        yield from _usable(itertools.islice(source.records(), start, end), *reading, counts)
        # Counts are complete only behind the examples, so an additional row without tokens stores them.
        yield {"input_ids": [], "loss_mask": [], "counts": json.dumps(asdict(counts))}


def count_tokens(rows: Iterable[Mapping[str, Sequence[int]]], vocab_size: int) -> np.ndarray:
    """Count how often each token occurs among the supervised ones, which the target writes, as `[V]` int64.

    Args:
        rows (`Iterable[Mapping]`): Examples with `input_ids` and `loss_mask`, such as a [`RowDataset`].
        vocab_size (`int`): Number of tokens of the target (V).
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        written = np.asarray(row["input_ids"], dtype=np.int64)[np.asarray(row["loss_mask"], dtype=bool)]
        np.add.at(counts, written, 1)
    return counts


def most_frequent(counts: Any, size: int) -> list[int]:
    """Return the ids of the most frequent tokens in ascending order; among equally frequent tokens, lower ids win.

    These tokens are worth drafting (FR-Spec, arXiv 2502.14856).

    Args:
        counts (`np.ndarray` or `Sequence[int]`): How often each token occurs, `[V]`.
        size (`int`): Number of tokens to return.

    Example:
    ```python
    >>> from hf_domino.data import most_frequent
    >>> most_frequent([0, 7, 2, 9, 2], size=3)
    [1, 2, 3]

    ```
    """
    order = np.argsort(-np.asarray(counts), kind="stable")
    return sorted(order[:size].tolist())
