"""Conversations of the shapes that data sets have, as messages with `role` and `content`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_domino.data.chat import Message

# Who speaks, in ShareGPT-like records -> as chat templates say it.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip


def read_messages(record: Mapping[str, Any], field: str, place: str) -> list[Message]:
    """The messages of a record: with `role` and `content`, or with `from` and `value`.

    Raises:
        ValueError: If they are not a list of messages; the error names the one that is wrong.

    Example:
    ```python
    >>> from hf_domino.data.messages import read_messages
    >>> read_messages({"conversations": [{"from": "human", "value": "Hi"}]}, "conversations", "line 1")
    [{'role': 'user', 'content': 'Hi'}]

    ```
    """
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: field `{field}` must be a list of messages, got {str(messages)[:60]}.")
    return [_read_message(message, f"{place}: field `{field}[{index}]`") for index, message in enumerate(messages)]


def _read_message(message: Any, place: str) -> Message:
    known = isinstance(message, dict)
    if known and "from" in message and "role" not in message:
        if message["from"] not in ROLES or "value" not in message:
            names = ", ".join(ROLES)
            raise ValueError(f"{place} must have `value` and `from` one of {names}, got {str(message)[:60]}.")
        return {"role": ROLES[message["from"]], "content": message["value"]}
    if not known or not isinstance(message.get("role"), str) or "content" not in message:
        raise ValueError(f"{place} must have `role` and `content`, got {str(message)[:60]}.")
    # Columns of a table are null where a message has no such field; templates ask whether there is one.
    return {name: value for name, value in message.items() if value is not None or name == "content"}
