"""`RowDataset`: rows of token ids to train on, read from files, folders, data sets and lists.

A row is `{"input_ids": [...], "loss_mask": [...]}`. What is read lies on disk, memory-mapped, tokenized once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hf_domino._common.notices import notice
from hf_domino.data.counts import RowCounts
from hf_domino.data.encoding import PlacedRow, Row, RowEncoder
from hf_domino.data.records import read_text
from hf_domino.data.sources import Source, from_files, from_table
from hf_domino.data.tables import Sieve, cached_table, has_anchor, table_in_memory

ROWS_AT_ONCE = 1024


class RowDataset(Dataset):
    """Rows of token ids and loss masks, ready for [`DominoTrainer`].

    Args:
        rows (`Sequence[dict]`): Each with `input_ids` and `loss_mask`, of one length. Rows without two supervised
            neighbours hold no anchor and are left out; how many is said.
        counts (`RowCounts`, *optional*): What the rows are left of, if they were looked at already.

    Attributes:
        rows (`Sequence[dict]`): A list, or a memory-mapped `datasets.Dataset`.
        counts (`RowCounts`): How many rows there are, and how many were left out and why.

    Raises:
        ValueError: If no row is left.
    """

    def __init__(self, rows: Sequence[Row], counts: RowCounts | None = None):
        self.rows, self.counts = (rows, counts) if counts is not None else _with_anchors(rows)
        if not len(self.rows):
            total = self.counts.left_out
            raise ValueError(
                f"rows must hold at least one with two neighbouring supervised tokens, got none in {total} rows: "
                f"raise max_length, or check that the loss falls on some tokens. {self.counts.describe()}".rstrip()
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def token_batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids of some rows in one line `[T]` with the lengths of these rows `[R]`, until all rows were given."""
        if isinstance(self.rows, list):
            for start in range(0, len(self.rows), ROWS_AT_ONCE):
                some = [np.asarray(row["input_ids"]) for row in self.rows[start : start + ROWS_AT_ONCE]]
                yield np.concatenate(some), np.array([len(ids) for ids in some])
            return
        table: Any = self.rows
        for batch in table.with_format("arrow").iter(ROWS_AT_ONCE):
            ids = batch["input_ids"].combine_chunks()
            yield ids.flatten().to_numpy(), ids.value_lengths().to_numpy()

    def select(self, indices: Sequence[int], counts: RowCounts) -> RowDataset:
        """Some of the rows.

        Args:
            indices (`Sequence[int]`): Which.
            counts (`RowCounts`): Why the others are left out; rows and tokens are counted anew.
        """
        rows = _pick(self.rows, indices)
        chosen = RowDataset(rows, counts)
        tokens = sum(len(ids) for ids, _ in chosen.token_batches())
        chosen.counts = replace(counts, rows=len(rows), tokens=tokens)
        return chosen

    def prompts(self, length: int) -> list[list[int]]:
        """Token ids before the first supervised token: all where none is, the first `length` where all are."""
        return [row["input_ids"][: _prompt_length(row["loss_mask"], length)] for row in self.rows]


def load_rows(
    path: str | Path | Sequence[str | Path] | Source,
    tokenizer: Any = None,
    max_length: int = 2048,
    vocab_size: int | None = None,
    max_rows: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    as_prompts: bool = False,
    drop_duplicates: bool = False,
    is_cached: bool = True,
) -> RowDataset:
    """Read training files or a data set, once: the rows are kept in a cache beside those of `datasets`.

    A `.jsonl` file holds one object per line, a `.json` file a list of objects or the same lines, a `.parquet` file one
    in each row. An object has `text`, or `prompt` and `completion` (strings or messages; loss on the completion), or
    `messages` or `conversations` (loss on assistant tokens), or `input_ids` with `prompt_length` or `loss_mask` (what
    [`generate_on_policy`] writes). Such rows are cut at `max_length`. Any other file is one text, cut into rows.

    Args:
        path (`str`, `Path`, a list of these, or `Source`): The file or files, or a [`~data.sources.from_dataset`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; needed for all but `input_ids`.
        max_length (`int`, *optional*, defaults to 2048): Longest row, in tokens.
        vocab_size (`int`, *optional*): The target's, which no token id may reach. Defaults to no limit.
        max_rows (`int`, *optional*): Most records to read, from the first on. Defaults to all.
        chat_template_kwargs (`Mapping`, *optional*): For the chat template, such as `{"enable_thinking": False}`.
        as_prompts (`bool`, *optional*, defaults to `False`): Rows whose answers the target is to write: prompts without
            an answer are rows too.
        drop_duplicates (`bool`, *optional*, defaults to `False`): Leave out rows that are equal to an earlier one.
        is_cached (`bool`, *optional*, defaults to `True`): Whether to use the cache, or to keep rows in memory.

    Returns:
        `RowDataset`: The rows, with what was left out in `counts`.

    Raises:
        ValueError: If a line or field is not as described, or no row can be trained on.
        FileNotFoundError: If there is no such file.
    """
    if not isinstance(path, Source):
        path = from_files([path] if isinstance(path, (str, Path)) else path)
    encoder = RowEncoder(tokenizer, vocab_size, dict(chat_template_kwargs or {}), as_prompts)
    sieve = Sieve(max_length, as_prompts, drop_duplicates)
    settings = f"{max_length} {max_rows} {as_prompts} {drop_duplicates}"

    def read() -> Iterator[Row]:
        return sieve.sift(_encode(path, encoder, sieve, max_rows))

    if is_cached:
        fingerprint = f"{path.name} {path.fingerprint()} {encoder.fingerprint()} {settings}"
        rows, counts = cached_table(fingerprint, read, sieve, path.name)
    else:
        rows, counts = table_in_memory(read()), sieve.counts
    if len(rows) and (said := counts.describe()):
        notice(f"{path.name}: {said}")
    return RowDataset(rows, counts)


def encode_dataset(
    dataset: Any,
    tokenizer: Any,
    max_length: int,
    vocab_size: int,
    name: str,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Rows of a dataset whose records have text, as the lines of a file in [`load_rows`].

    Args:
        dataset (`Sequence[Mapping]`): A list or a `datasets.Dataset` of records, a dictionary of such, or None. What
            has a `loss_mask` already, or no length, is returned as it is.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; needed for all but `input_ids`.
        max_length (`int`): Longest row, in tokens.
        vocab_size (`int`): The target's.
        name (`str`): What the dataset is called in errors.
        chat_template_kwargs (`Mapping`, *optional*): For the chat template.

    Raises:
        ValueError: If a record is not as described, or no row can be trained on.
    """
    shape = (tokenizer, max_length, vocab_size)
    if isinstance(dataset, dict):
        return {
            key: encode_dataset(value, *shape, f"{name}[{key!r}]", chat_template_kwargs)
            for key, value in dataset.items()
        }
    if not hasattr(dataset, "__len__") or (len(dataset) and "loss_mask" in dataset[0]):
        return dataset
    source = from_table(dataset, name)
    is_table = hasattr(dataset, "_fingerprint")  # of `datasets`, which the cache can know again
    return load_rows(source, *shape, chat_template_kwargs=chat_template_kwargs, is_cached=is_table)


def collate_rows(rows: Sequence[Row], pad_token_id: int = 0, multiple: int = 1) -> dict[str, torch.Tensor]:
    """Pad rows on the right.

    Args:
        rows (`Sequence[dict]`): Items of a [`RowDataset`].
        pad_token_id (`int`, *optional*, defaults to 0): Fills `input_ids`; never seen and never scored.
        multiple (`int`, *optional*, defaults to 1): Of which S is one.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids`, `loss_mask` and `attention_mask`, `[B, S]` int64.

    Raises:
        ValueError: If they are not such rows, but records of text from a dataset without length.
    """
    if "loss_mask" not in rows[0]:
        fields = ", ".join(f"`{field}`" for field in rows[0])
        raise ValueError(f"rows must have `input_ids` and `loss_mask`, got {fields}: load them with load_rows.")
    ids = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    masks = [torch.as_tensor(row["loss_mask"], dtype=torch.int64) for row in rows]
    return {
        "input_ids": pad_rows(ids, multiple, pad_token_id),
        "loss_mask": pad_rows(masks, multiple),
        "attention_mask": pad_rows([torch.ones_like(row) for row in ids], multiple),
    }


def pad_rows(rows: Sequence[torch.Tensor], multiple: int = 1, value: int = 0) -> torch.Tensor:
    """Stack rows `[S, ...]` of several lengths, padded on the right to a multiple."""
    padded = pad_sequence(list(rows), batch_first=True, padding_value=value)
    spare = -padded.shape[1] % multiple
    return F.pad(padded, (0, 0) * (padded.dim() - 2) + (0, spare), value=value) if spare else padded


def _encode(source: Source, encoder: RowEncoder, sieve: Sieve, max_rows: int | None = None) -> Iterator[PlacedRow]:
    """All rows of a source, before they are sifted."""
    for place, record in itertools.islice(source.records(), max_rows):
        sieve.read()
        for row in encoder.encode(record, place):
            yield place, row
    for path in source.texts:
        for placed in itertools.islice(encoder.encode_text(read_text(path), sieve.max_length, str(path)), max_rows):
            sieve.read()
            yield placed


def _with_anchors(rows: Any) -> tuple[Sequence[Row], RowCounts]:
    """The rows of a list or a table that hold an anchor; what is left of it is again a list or a table."""
    left_out = [index for index, row in enumerate(rows) if not has_anchor(row["loss_mask"])]
    chosen = _pick(rows, sorted(set(range(len(rows))).difference(left_out)))
    tokens = sum(len(row["input_ids"]) for row in chosen)
    first = f"row {left_out[0] + 1}" if left_out else None
    counts = RowCounts(len(rows), len(chosen), tokens, without_anchor=len(left_out), first_left_out=first)
    if left_out and len(chosen):
        notice(counts.describe())
    return chosen, counts


def _pick(rows: Any, indices: Sequence[int]) -> Sequence[Row]:
    return rows.select(indices) if hasattr(rows, "select") else [rows[index] for index in indices]


def _prompt_length(loss_mask: list[int], length: int) -> int:
    if 1 not in loss_mask:
        return len(loss_mask)
    return loss_mask.index(1) or length
