"""Training rows from files: text, prompt and completion, chat with the loss on assistant tokens, or token ids.

A row is `{"input_ids": [...], "loss_mask": [...]}`. What is wrong in a file is reported with its line and field.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hf_domino.data.chat import encode_chat
from hf_domino.data.records import read_records, read_text
from hf_domino.notices import notice

Row = dict[str, list[int]]
RECORD_SUFFIXES = (".jsonl", ".json")


class RowDataset(Dataset):
    """Rows of token ids and loss masks, ready for [`DominoTrainer`].

    Args:
        rows (`Sequence[dict]`): Each with `input_ids` and `loss_mask`, of one length. Rows without two supervised
            neighbours hold no anchor and are left out; how many is said.

    Raises:
        ValueError: If no row is left.
    """

    def __init__(self, rows: Sequence[Row]):
        self.rows = [row for row in rows if _has_anchor(row["loss_mask"])]
        num_left_out = len(rows) - len(self.rows)
        if num_left_out and self.rows:
            first = next(number for number, row in enumerate(rows, start=1) if not _has_anchor(row["loss_mask"]))
            notice(
                f"{num_left_out} of {len(rows)} rows are left out, the first is row {first}: they hold no two "
                "neighbouring supervised tokens. Raise max_length if they were cut, or check where the loss falls."
            )
        if not self.rows:
            raise ValueError(
                f"rows must hold at least one with two neighbouring supervised tokens, got none in {len(rows)} rows: "
                "raise max_length, or check that the loss falls on some tokens."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def prompts(self, length: int) -> list[list[int]]:
        """Token ids before the first supervised token, or the first `length` where all tokens are supervised."""
        starts = [row["loss_mask"].index(1) or length for row in self.rows]
        return [row["input_ids"][:start] for row, start in zip(self.rows, starts, strict=True)]


def load_rows(
    path: str | Path, tokenizer: Any = None, max_length: int = 2048, vocab_size: int | None = None
) -> RowDataset:
    """Read a training file.

    A `.jsonl` file holds one object per line, a `.json` file a list of objects or the same lines. An object has `text`,
    or `prompt` and `completion` (loss on the completion), or `messages` (loss on assistant tokens), or `input_ids` with
    `prompt_length` or `loss_mask` (what [`generate_on_policy`] writes). Such rows are cut at `max_length`. Any other
    file is one text, cut into rows.

    Args:
        path (`str` or `Path`): The file.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; needed for all but `input_ids`.
        max_length (`int`, *optional*, defaults to 2048): Longest row, in tokens.
        vocab_size (`int`, *optional*): The target's, which no token id may reach. Defaults to no limit.

    Returns:
        `RowDataset`: The rows.

    Raises:
        ValueError: If a line or field is not as described, or no row can be trained on.
        FileNotFoundError: If there is no such file.
    """
    return RowDataset(read_rows(path, tokenizer, max_length, vocab_size))


def read_rows(
    path: str | Path, tokenizer: Any = None, max_length: int = 2048, vocab_size: int | None = None
) -> list[Row]:
    """Rows of a file as in [`load_rows`], also those without an anchor; possibly none."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no training file at {path}: pass a .jsonl, .json or text file.")
    if path.suffix in RECORD_SUFFIXES:
        return [
            _encode_record(record, tokenizer, max_length, vocab_size, place) for place, record in read_records(path)
        ]
    ids = tokenizer(read_text(path))["input_ids"]
    _check_ids(ids, vocab_size, str(path))
    pieces = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
    return [_supervised(piece) for piece in pieces]


def encode_dataset(dataset: Any, tokenizer: Any, max_length: int, vocab_size: int, name: str) -> Any:
    """Rows of a dataset whose records have text, as the lines of a file in [`load_rows`].

    Args:
        dataset (`Sequence[Mapping]`): A list or a `datasets.Dataset` of records, a dictionary of such, or None. What
            has a `loss_mask` already, or no length, is returned as it is.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; needed for all but `input_ids`.
        max_length (`int`): Longest row, in tokens.
        vocab_size (`int`): The target's.
        name (`str`): What the dataset is called in errors.

    Returns:
        `RowDataset`, or a dictionary of such, or `dataset`.

    Raises:
        ValueError: If a record is not as described, or no row can be trained on.
    """
    if isinstance(dataset, dict):
        return {
            key: encode_dataset(value, tokenizer, max_length, vocab_size, f"{name}[{key!r}]")
            for key, value in dataset.items()
        }
    if not hasattr(dataset, "__len__") or (len(dataset) and "loss_mask" in dataset[0]):
        return dataset
    records = enumerate(dataset)
    return RowDataset(
        [_encode_record(record, tokenizer, max_length, vocab_size, f"{name}[{index}]") for index, record in records]
    )


def collate_rows(rows: Sequence[Row], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Pad rows on the right.

    Args:
        rows (`Sequence[dict]`): Items of a [`RowDataset`].
        pad_token_id (`int`, *optional*, defaults to 0): Fills `input_ids`; never seen and never scored.

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
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_token_id),
        "loss_mask": pad_sequence(masks, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def _has_anchor(loss_mask: list[int]) -> bool:
    return any(first and second for first, second in itertools.pairwise(loss_mask))


def _supervised(ids: list[int], start: int = 0) -> Row:
    return {"input_ids": list(ids), "loss_mask": [int(position >= start) for position in range(len(ids))]}


def _encode_record(
    record: Mapping[str, Any], tokenizer: Any, max_length: int, vocab_size: int | None, place: str
) -> Row:
    row = _encode(record, tokenizer, place)
    _check_ids(row["input_ids"], vocab_size, place)
    return {key: values[:max_length] for key, values in row.items()}


def _check_ids(ids: list[int], vocab_size: int | None, place: str) -> None:
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        raise ValueError(
            f"{place}: token ids must be in [0, {vocab_size - 1}] (the target's vocab_size), got {max(ids)}: "
            "use the target's own tokenizer."
        )


def _encode(record: Mapping[str, Any], tokenizer: Any, place: str) -> Row:
    """Encode one object by the fields it has."""
    if "input_ids" in record:
        return _encode_ids(record, place)
    if tokenizer is None:
        raise ValueError(f"{place}: needs a tokenizer, got none: pass the target's, or rows of `input_ids`.")
    if "messages" in record:
        ids, loss_mask = encode_chat(_messages(record, place), tokenizer, place)
        return {"input_ids": ids, "loss_mask": loss_mask}
    if "prompt" in record:
        prompt, completion = (_string(record, field, place) for field in ("prompt", "completion"))
        prompt_ids = tokenizer(prompt)["input_ids"]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        completion_ids = tokenizer(completion, add_special_tokens=False)["input_ids"] + eos
        return _supervised(prompt_ids + completion_ids, start=len(prompt_ids))
    if "text" in record:
        return _supervised(tokenizer(_string(record, "text", place))["input_ids"])
    fields = ", ".join(f"`{field}`" for field in record) or "none"
    raise ValueError(f"{place}: needs `text`, `prompt` and `completion`, `messages` or `input_ids`, got {fields}.")


def _encode_ids(record: Mapping[str, Any], place: str) -> Row:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{place}: field `input_ids` must be a list of token ids, got {str(ids)[:60]}.")
    if mask is None:
        start = record.get("prompt_length", 0)
        if type(start) is not int or not 0 <= start <= len(ids):
            raise ValueError(f"{place}: field `prompt_length` must be in [0, {len(ids)}], got {start!r}.")
        return _supervised(ids, start)
    if not isinstance(mask, list) or len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise ValueError(f"{place}: field `loss_mask` must be {len(ids)} zeros and ones, got {str(mask)[:60]}.")
    return {"input_ids": ids, "loss_mask": [int(value) for value in mask]}


def _string(record: Mapping[str, Any], field: str, place: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{place}: field `{field}` must be a string, got {value!r}.")
    return value


def _messages(record: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: field `messages` must be a list of messages, got {str(messages)[:60]}.")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"{place}: field `messages[{index}]` must have `role` and `content`, got {str(message)[:60]}."
            )
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError(f"{place}: field `messages` must hold an assistant message, got none.")
    return messages
