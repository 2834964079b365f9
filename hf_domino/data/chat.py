"""Conversations: messages of the shapes that data sets have, and their token ids with the loss on the assistant's.

A chat template with a generation block says itself which tokens are the assistant's. For any other, the conversation
is rendered turn by turn, and what an assistant turn adds to its generation prompt is the assistant's. A turn that the
template renders differently once others follow (dropped reasoning) is learned from a row of its own that ends with it,
as the target would write it. A turn that opens the conversation carries no loss: the target writes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
Message = dict[str, Any]
Row = dict[str, list[int]]  # token ids, and a loss mask: 1 for the assistant's or 0
UNANSWERED = "Let the target write the answer (hf-domino data), or leave the record out."
UNTOLD: Row = {"input_ids": [], "loss_mask": []}  # stands for a turn that cannot be told from what asks for it
# Who speaks, in ShareGPT-like records -> as chat templates say it.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_call": "assistant",
}  # fmt: skip
SAID = "`role` and `content`, which must be text alone (or null beside `tool_calls`)"


# --- messages -----------------------------------------------------------------------------------------------------


def field_of(record: Mapping[str, Any], needed: str) -> str:
    """Find the field that a record's text or chat is in."""
    if name := next((name for name in ("messages", "conversations", "prompt", "text") if name in record), None):
        return name
    raise ValueError(f"needs {needed}, got {', '.join(f'`{name}`' for name in record) or 'none'}.")


def read_string(record: Mapping[str, Any], field: str) -> str:
    """Read a field that must be a string."""
    if not isinstance(value := record.get(field), str):
        raise ValueError(f"field `{field}` must be a string, got {str(value)[:60]}.")
    return value


def read_messages(record: Mapping[str, Any], field: str) -> list[Message]:
    """Read the messages of a record; each gets a `role` and a `content` that is a string.

    Example:
    ```python
    >>> from hf_domino.data.chat import read_messages
    >>> read_messages({"conversations": [{"from": "human", "value": "Hi"}]}, "conversations")
    [{'role': 'user', 'content': 'Hi'}]

    ```
    """
    messages = _without_nulls(record[field])
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field `{field}` must be a list of messages, got {str(messages)[:60]}.")
    return [_read_message(message, f"field `{field}[{index}]`") for index, message in enumerate(messages)]


def read_tools(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the `tools` of a record, a list or JSON of one, as an argument of the chat template."""
    tools = _parsed(_without_nulls(record.get("tools"))) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"field `tools` must be a list of objects, or JSON of it, got {str(tools)[:60]}.")
    return {"tools": tools} if tools else {}


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Put a system turn in front of a chat, unless it has one or `system` is None."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _read_message(message: Any, name: str) -> Message:
    known = isinstance(message, dict)
    if known and "from" in message and "role" not in message:
        if message["from"] not in ROLES or "value" not in message:
            known_roles = ", ".join(ROLES)
            raise ValueError(f"{name} must have `value` and `from` one of {known_roles}, got {str(message)[:60]}.")
        said = "tool_calls" if message["from"] == "function_call" else "content"
        others = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = others | {"role": ROLES[message["from"]], said: message["value"]}
    if not known or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must have {SAID}, got {str(message)[:60]}.")
    called = message.pop("function_call", None)  # OpenAI's older name for one call
    content, calls = message.get("content"), _parsed(message.pop("tool_calls", None)) or called
    if calls:
        content, message["tool_calls"] = content or "", _read_calls(calls, f"{name}: `tool_calls`")
    parts = content if content and isinstance(content, list) else [{"text": content}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{name} must have {SAID}, got {str(part)[:60]} in {str(message)[:60]}.")
    return message | {"content": "".join(part["text"] for part in parts)}


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Read tool calls as most templates want them: each a `function` with a `name` and an object of `arguments`."""
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _parsed(function.get("arguments") or {})
        if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
            raise ValueError(f"{name} must have `name`, and `arguments` as an object, got {str(call)[:60]}.")
        others = {"type": "function"} if function is call else call
        read.append(others | {"function": function | {"arguments": arguments}})
    return read


def _parsed(value: Any) -> Any:
    """Parse a string of JSON, and return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def _without_nulls(value: Any) -> Any:
    """Drop fields that are null at every depth: tables fill in null where a record has no such field."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


# --- token ids ----------------------------------------------------------------------------------------------------


def encode_chat(
    messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any], start: int = 0
) -> list[Row]:
    """Render a conversation, and mark the assistant's tokens in the messages from `start` on.

    Rows are one, one more for every turn that the whole renders differently, and `UNTOLD` for every turn that does not
    begin as the template asks for it.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= max(start, 1)]
    if not turns:
        raise ValueError(
            f"field `messages` must hold an assistant message that answers another, got none (one that opens "
            f"the chat does not). {UNANSWERED}"
        )
    shown: Callable[..., Any] = partial(_render, tokenizer=tokenizer, **template_kwargs)
    template = tokenizer.chat_template
    if not (isinstance(template, str) and GENERATION_BLOCK.search(template)):
        return _encode_by_turns(messages, turns, tokenizer, partial(shown, tokenize=False))
    encoded = shown(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, loss_mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if start:
        prompt = encode_prompt(messages[:start], tokenizer, template_kwargs)
        unlike = (index for index, pair in enumerate(zip(ids, prompt, strict=False)) if len(set(pair)) > 1)
        length = next(unlike, min(len(ids), len(prompt)))
        loss_mask = [0] * length + loss_mask[length:]
    learnt = tokenizer.decode([token for token, counts in zip(ids, loss_mask, strict=True) if counts])
    for index in turns:
        _check_calls(messages, index, learnt)
    return [{"input_ids": ids, "loss_mask": loss_mask}]


def encode_prompt(messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Encode a conversation up to where the assistant's next turn begins."""
    return tokenizer(render_prompt(messages, tokenizer, template_kwargs), add_special_tokens=False)["input_ids"]


def render_prompt(messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """Render a conversation up to where the assistant's next turn begins."""
    return _render(messages, tokenizer, tokenize=False, add_generation_prompt=True, **template_kwargs)


def _encode_by_turns(
    messages: list[Message], places: list[int], tokenizer: Any, shown: Callable[..., str]
) -> list[Row]:
    if not tokenizer.is_fast:
        raise ValueError(
            "field `messages` needs a fast tokenizer, which tells where its tokens stand in a text, got "
            f"{type(tokenizer).__name__}: save it as a fast one, or use `prompt` and `completion`."
        )
    whole, turns, rows = shown(messages), [], []  # turns: the conversation as it is before one, and as it is with it
    for index in places:
        before, after = shown(messages[:index], add_generation_prompt=True), shown(messages[: index + 1])
        if not after.startswith(before):
            rows.append(UNTOLD)
            continue
        _check_calls(messages, index, after[len(before) :])
        turns.append((before, after))
    while turns:
        spans = [(len(before), len(after)) for before, after in turns if whole.startswith(after)]
        if spans:
            encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
            offsets = encoded["offset_mapping"]
            mask = [int(any(start <= first < last <= end for start, end in spans)) for first, last in offsets]
            rows.append({"input_ids": encoded["input_ids"], "loss_mask": mask})
        turns = [turn for turn in turns if not whole.startswith(turn[1])]
        whole = turns[-1][1] if turns else ""
    return rows


def _check_calls(messages: Sequence[Message], index: int, learnt: str) -> None:
    """Refuse a turn whose tool calls the template hides: only the end of the turn would be learned."""
    if not all(call["function"]["name"] in learnt for call in messages[index].get("tool_calls", ())):
        raise ValueError(f"field `messages[{index}]`: the chat template does not show its `tool_calls`.")


def _render(messages: list[Message], tokenizer: Any, **kwargs: Any) -> Any:
    if tokenizer.chat_template is None:
        raise ValueError(
            "field `messages` needs a tokenizer with a chat template, and this one has none: "
            "set tokenizer.chat_template, or use `prompt` and `completion`."
        )
    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise ValueError(f"field `messages`: the chat template refuses it: {error}") from error
