"""Records as rows: what kinds of records there are, and where the loss falls in each.

A row is `{"input_ids": [...], "loss_mask": [...]}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_domino.data.chat import (
    UNANSWERED,
    Row,
    encode_chat,
    field_of,
    read_messages,
    read_string,
    read_tools,
)

NEEDED = "`text`, `prompt` and `completion`, `messages`, `conversations` or `input_ids`"


def encode_record(record: Mapping[str, Any], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[Row]:
    """Encode one record as rows, uncut; some conversations give more than one."""
    if "input_ids" in record:
        return [_read_ids(record)]
    if tokenizer is None:
        raise ValueError("needs a tokenizer, got none: pass the target's, or rows of `input_ids`.")
    name = field_of(record, NEEDED)
    if name == "text":
        return [_supervised(tokenizer(read_string(record, name))["input_ids"])]
    if name == "prompt" and not isinstance(record[name], list):
        prompt_ids = tokenizer(read_string(record, name))["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        completion_ids = tokenizer(_answer(record), add_special_tokens=False)["input_ids"] + end
        return [_supervised(prompt_ids + completion_ids, start=len(prompt_ids))]
    messages, start = read_messages(record, name), 0
    if name == "prompt":  # the completion of a prompt of messages is messages too, or what the assistant says
        start = len(messages)
        if isinstance(record.get("completion"), list):
            messages += read_messages(record, "completion")
        else:
            messages.append({"role": "assistant", "content": _answer(record)})
    return encode_chat(messages, tokenizer, {**template_kwargs, **read_tools(record)}, start)


def _supervised(ids: list[int], start: int = 0) -> Row:
    return {"input_ids": list(ids), "loss_mask": [int(position >= start) for position in range(len(ids))]}


def _read_ids(record: Mapping[str, Any]) -> Row:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"field `input_ids` must be a list of token ids, got {str(ids)[:60]}.")
    if mask is None:
        start = record.get("prompt_length", 0)
        if type(start) is not int or not 0 <= start <= len(ids):
            raise ValueError(f"field `prompt_length` must be in [0, {len(ids)}], got {start!r}.")
        return _supervised(ids, start)
    if not isinstance(mask, list) or len(mask) != len(ids) or not set(mask) <= {0, 1}:
        raise ValueError(f"field `loss_mask` must be {len(ids)} zeros and ones, got {str(mask)[:60]}.")
    return {"input_ids": ids, "loss_mask": [int(value) for value in mask]}


def _answer(record: Mapping[str, Any]) -> str:
    if record.get("completion") is None:
        raise ValueError(f"field `completion` must be a string, got None. {UNANSWERED}")
    return read_string(record, "completion")
