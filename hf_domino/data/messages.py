"""Conversations of the shapes that data sets have, as messages with `role` and `content`, and their tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_domino.data.chat import Message

# Who speaks, in ShareGPT-like records -> as chat templates say it.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_call": "assistant",
}  # fmt: skip
SAID = "`role` and `content`, which must be text alone (or null beside `tool_calls`)"


def read_messages(record: Mapping[str, Any], field: str, place: str) -> list[Message]:
    """The messages of a record, with `role` and `content` each, whose `content` is a string.

    They may be written with `from` and `value`, or in parts of text. Tool calls may be JSON.

    Raises:
        ValueError: If they are not a list of messages; the error names the one that is wrong.

    Example:
    ```python
    >>> from hf_domino.data.messages import read_messages
    >>> read_messages({"conversations": [{"from": "human", "value": "Hi"}]}, "conversations", "line 1")
    [{'role': 'user', 'content': 'Hi'}]

    ```
    """
    messages = _without_nulls(record[field])
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: field `{field}` must be a list of messages, got {str(messages)[:60]}.")
    return [_read_message(message, f"{place}: field `{field}[{index}]`") for index, message in enumerate(messages)]


def read_tools(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The `tools` of a record, a list or JSON of one, as an argument for the chat template; none where there are none.

    Raises:
        ValueError: If they are no list of objects.
    """
    tools = _parsed(_without_nulls(record.get("tools"))) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{place}: field `tools` must be a list of objects, or JSON of it, got {str(tools)[:60]}.")
    return {"tools": tools} if tools else {}


def _read_message(message: Any, place: str) -> Message:
    known = isinstance(message, dict)
    if known and "from" in message and "role" not in message:
        if message["from"] not in ROLES or "value" not in message:
            names = ", ".join(ROLES)
            raise ValueError(f"{place} must have `value` and `from` one of {names}, got {str(message)[:60]}.")
        what = "tool_calls" if message["from"] == "function_call" else "content"
        others = {name: value for name, value in message.items() if name not in ("from", "value")}
        message = others | {"role": ROLES[message["from"]], what: message["value"]}
    if not known or not isinstance(message.get("role"), str):
        raise ValueError(f"{place} must have {SAID}, got {str(message)[:60]}.")
    called = message.pop("function_call", None)  # OpenAI's older name for one call
    content, calls = message.get("content"), _parsed(message.pop("tool_calls", None)) or called
    if calls:
        content, message["tool_calls"] = content or "", _read_calls(calls, f"{place}: `tool_calls`")
    parts = content if content and isinstance(content, list) else [{"text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{place} must have {SAID}, got {str(part)[:60]} in {str(message)[:60]}.")
    return message | {"content": "".join(part["text"] for part in parts)}


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Calls as most templates read them: each a `function` with `name`, and with `arguments` that are no string."""
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError(f"{place} must have `name`, and `arguments` as an object, got {str(call)[:60]}.")
        others = {"type": "function"} if function is call else call
        read.append(others | {"function": function | {"arguments": arguments}})
    return read


def _parsed(value: Any) -> Any:
    """What a string of JSON says; any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def _without_nulls(value: Any) -> Any:
    """A value without the fields that are null, which tables hold at every depth where a record has no such field."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
