"""Read training examples into a `RowDataset`, from files, folders, data sets and lists.

A row is one example, `{"input_ids": [...], "loss_mask": [...]}`, which takes five bytes per token in a table of
`datasets`. Examples from files are tokenized once, stored on disk and memory-mapped.

Shapes: R examples, T tokens of several concatenated examples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hf_domino._common.notices import notice
from hf_domino.data.chat import Example
from hf_domino.data.records import Source, from_files, from_table
from hf_domino.data.row_cache import read_rows, token_batches, usable
from hf_domino.data.row_counts import RowCounts

MOST_SEEN = 2**20  # examples whose hashes a stream remembers, in 63 bytes each
NONE_LEFT = (
    "rows must hold at least one with two neighbouring tokens to learn, got none in {0} rows: raise max_length, or "
    "check the loss masks. {1}"
)


class RowDataset(Dataset):
    """Examples of token ids and loss masks, ready for [`DominoTrainer`].

    Args:
        rows (`Sequence[dict]`): A list or a `datasets.Dataset` of records with `input_ids`, which are read like the
            records of a file in [`load_rows`]: `loss_mask` and the other masks say what is learned, and padding is
            dropped. Examples without two neighbouring supervised tokens have no anchor and are left out; a notice
            counts them.
        counts (`RowCounts`, *optional*): The counts of `rows`, if these were read already and are a `datasets.Dataset`
            of `input_ids` and `loss_mask`. Without counts, the records are read here.
        dataset_name (`str`, *optional*): Name of the data set on the Hub that they come from.

    Attributes:
        rows (`datasets.Dataset`): The examples, memory-mapped if they were read from files.
        counts (`RowCounts`): How many examples there are, and how many were left out and why.

    Raises:
        ValueError: If a record is malformed, or no example is left.
    """

    def __init__(self, rows: Any, counts: RowCounts | None = None, dataset_name: str | None = None):
        if counts is None:
            rows, counts = read_rows(from_table(rows, "rows"), None, {}, None, None, None)
        self.rows = rows
        self.counts = counts
        self.dataset_name = dataset_name
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
        if fits:
            return self
        source = replace(from_table(self.rows, name), dataset=self.dataset_name)
        return load_rows(source, None, max_length, vocab_size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.rows[index]

    def token_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over the concatenated token ids `[T]` of several examples with the lengths `[R]` of these."""
        return token_batches(self.rows)


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
            Each takes a few seconds to start, so several of them only pay for large files. Defaults to one.

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
    rows, counts = read_rows(path, tokenizer, template_kwargs, max_length, vocab_size, max_rows, num_proc)
    return RowDataset(rows, counts, path.dataset)


class RowStream(IterableDataset):
    """Examples of a data set without a length, read in each pass as [`load_rows`] reads the records of a file.

    Copies are only counted of the first million different examples, because a stream can be endless and memory is not.

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
        yield from usable(from_table(self.dataset, self.name).records(), *self._reading, counts, MOST_SEEN)
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
