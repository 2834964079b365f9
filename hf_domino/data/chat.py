"""Conversations: messages of the shapes that data sets have, and their token ids with the loss on the assistant's.

A chat template with a generation block says itself which tokens are the assistant's. For any other, the conversation
is rendered turn by turn, and what an assistant turn adds to its generation prompt is the assistant's. A turn that the
template renders differently once others follow (dropped reasoning) is learned from a row of its own that ends with it,
as the target would write it. A turn that opens the conversation carries no loss: the target writes none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
Message = dict[str, Any]
Row = dict[str, list[int]]  # token ids, and a loss mask: 1 for the assistant's or 0
UNANSWERED = "Let the target write the answer (hf-domino data), or leave the record out."
UNTOLD: Row = {"input_ids": [], "loss_mask": []}  # stands for a turn that cannot be told from what asks for it
# Who speaks, in ShareGPT-like records -> as chat templates say it.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SAID = "`role` and `content`, which must be text (or null beside `tool_calls`)"


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
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field `{field}` must be a list of messages, got {str(messages)[:60]}.")
    return [_read_message(message, f"field `{field}[{index}]`") for index, message in enumerate(messages)]


def read_tools(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the `tools` of a record, a list or JSON of one, as an argument of the chat template."""
    tools = record.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except json.JSONDecodeError as error:
        raise ValueError(f"field `tools` must be a list of objects, or JSON of it: {error}.") from error
    return {"tools": tools} if tools else {}


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Put a system turn in front of a chat, unless it has one or `system` is None."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _read_message(given: Any, name: str) -> Message:
    message = given if isinstance(given, dict) else {}
    if "from" in message and "role" not in message:
        message = {"role": ROLES.get(message["from"]), "content": message.get("value")}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name} must have {SAID}, got {str(given)[:60]}.")
    return message | {"content": content}


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
