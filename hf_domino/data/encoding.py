"""Records as rows: what kinds of records there are, and where the loss falls in each.

A row is `{"input_ids": [...], "loss_mask": [...]}`. What is wrong in a record is reported with its place and field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_domino.data.chat import UNANSWERED, Row, encode_chat, encode_prompt
from hf_domino.data.messages import read_messages, read_tools

PlacedRow = tuple[str, Row]
NEEDED = "`text`, `prompt` and `completion`, `messages`, `conversations` or `input_ids`"


@dataclass(frozen=True)
class RowEncoder:
    """Turns records into rows of token ids, for one target.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's; needed for all but `input_ids`.
        vocab_size (`int`, *optional*): The target's, which no token id may reach. Defaults to no limit.
        chat_template_kwargs (`Mapping`, *optional*): For the chat template, such as `{"enable_thinking": False}`.
        as_prompts (`bool`, *optional*, defaults to `False`): Take records without an answer too, as rows without loss:
            the target is to write it.
    """

    tokenizer: Any = None
    vocab_size: int | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    as_prompts: bool = False

    def encode(self, record: Mapping[str, Any], place: str) -> list[Row]:
        """Encode one record by the fields it has; `place` is where it stands, for errors.

        Returns:
            `list[dict]`: Its rows, uncut; more than one for some conversations, see [`encode_chat`].

        Raises:
            ValueError: If it is no record of a kind that is known, or a token id is not the target's.
        """
        rows = self._encode(record, place)
        for row in rows:
            self._check_ids(row["input_ids"], place)
        return rows

    def encode_text(self, pieces: Iterable[str], length: int, place: str) -> Iterator[PlacedRow]:
        """Encode one text, given in pieces, as rows of `length` tokens that all carry loss; the last may be shorter."""
        left: list[int] = []
        number = 0
        for index, piece in enumerate(pieces):
            left += self._tokenizer(place)(piece, add_special_tokens=index == 0)["input_ids"]
            self._check_ids(left, place)
            whole = len(left) - len(left) % length
            for start in range(0, whole, length):
                number += 1
                yield f"{place}, piece {number}", _supervised(left[start : start + length])
            left = left[whole:]
        if left:
            yield f"{place}, piece {number + 1}", _supervised(left)

    def encode_frame(self) -> list[int]:
        """Token ids of a conversation in which nothing is said, if the template allows one: what all rows share."""
        try:
            return encode_prompt([{"role": "user", "content": ""}], self.tokenizer, "", self.chat_template_kwargs)
        except (ValueError, AttributeError):  # no template, or no tokenizer
            return []

    def fingerprint(self) -> str:
        """Digest of all that decides how a record is encoded."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            said = backend.to_str()
        else:  # a slow tokenizer has no one description of itself; its vocabulary and settings are what it is made of
            vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
            said = [type(tokenizer).__name__, getattr(tokenizer, "init_kwargs", None), vocabulary]
        template = getattr(tokenizer, "chat_template", None), dict(self.chat_template_kwargs)
        facts = [said, str(getattr(tokenizer, "eos_token_id", None)), template, self.vocab_size, self.as_prompts]
        return hashlib.sha256(json.dumps(facts, default=str, sort_keys=True).encode()).hexdigest()

    def _encode(self, record: Mapping[str, Any], place: str) -> list[Row]:
        if "input_ids" in record:
            return [_read_ids(record, place)]
        name = next((name for name in ("messages", "conversations", "prompt") if name in record), None)
        if name == "prompt" and not isinstance(record[name], list):
            return [self._encode_strings(record, place)]
        if name is not None:
            return self._encode_chat(record, name, place)
        if "text" in record:
            return [_supervised(self._tokenizer(place)(_string(record, "text", place))["input_ids"])]
        fields = ", ".join(f"`{name}`" for name in record) or "none"
        raise ValueError(f"{place}: needs {NEEDED}, got {fields}.")

    def _encode_chat(self, record: Mapping[str, Any], name: str, place: str) -> list[Row]:
        """A chat; the completion of a prompt of messages is messages too, or what the assistant says."""
        messages, completion, start = read_messages(record, name, place), record.get("completion"), 0
        tokenizer, kwargs = self._tokenizer(place), {**self.chat_template_kwargs, **read_tools(record, place)}
        if name == "prompt" and not (self.as_prompts and completion is None):
            start = len(messages)
            if isinstance(completion, list):
                messages += read_messages(record, "completion", place)
            else:
                messages.append({"role": "assistant", "content": _answer(record, place)})
        if self.as_prompts and not start and messages[-1]["role"] != "assistant":
            ids = encode_prompt(messages, tokenizer, place, kwargs)
            return [_supervised(ids, len(ids))]
        return encode_chat(messages, tokenizer, place, kwargs, start)

    def _encode_strings(self, record: Mapping[str, Any], place: str) -> Row:
        tokenizer = self._tokenizer(place)
        prompt_ids = tokenizer(_string(record, "prompt", place))["input_ids"]
        if self.as_prompts and record.get("completion") is None:
            return _supervised(prompt_ids, len(prompt_ids))
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        completion_ids = tokenizer(_answer(record, place), add_special_tokens=False)["input_ids"] + eos
        return _supervised(prompt_ids + completion_ids, start=len(prompt_ids))

    def _tokenizer(self, place: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{place}: needs a tokenizer, got none: pass the target's, or rows of `input_ids`.")
        return self.tokenizer

    def _check_ids(self, ids: list[int], place: str) -> None:
        if self.vocab_size is not None and ids and max(ids) >= self.vocab_size:
            raise ValueError(
                f"{place}: token ids must be in [0, {self.vocab_size - 1}] (the target's vocab_size), got {max(ids)}: "
                "use the target's own tokenizer."
            )


def _supervised(ids: list[int], start: int = 0) -> Row:
    return {"input_ids": list(ids), "loss_mask": [int(position >= start) for position in range(len(ids))]}


def _read_ids(record: Mapping[str, Any], place: str) -> Row:
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


def _answer(record: Mapping[str, Any], place: str) -> str:
    if record.get("completion") is None:
        raise ValueError(f"{place}: field `completion` must be a string, got None. {UNANSWERED}")
    return _string(record, "completion", place)


def _string(record: Mapping[str, Any], name: str, place: str) -> str:
    value = record.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{place}: field `{name}` must be a string, got {value!r}.")
    return value
