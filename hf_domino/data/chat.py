"""Conversations: messages of the shapes that data sets have, and their token ids with the loss on the assistant's.

The conversation is rendered turn by turn, and what an assistant turn adds to its generation prompt is the assistant's.
A chat template with a generation block says itself which part of that it is. A turn that the template renders
differently once others follow (dropped reasoning) is learned from a row of its own that ends with it, as the target
would write it. A turn that opens the conversation carries no loss: the target writes none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from hf_domino._common.refusal import refusal
from hf_domino.data.names import MESSAGE, check_names, has_loss
from hf_domino.data.records import at

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
Message = dict[str, Any]
Row = dict[str, list[int]]  # token ids, and a loss mask: 1 for the assistant's or 0
UNANSWERED = "Let the target write the answer (hf-domino data), or leave the record out."
UNTOLD: Row = {"input_ids": [], "loss_mask": []}  # stands for a turn that cannot be told from what asks for it
# Who speaks, in ShareGPT-like records -> as chat templates say it.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
# What chat templates on the Hub know; the last ones those of Llama 3, GLM-4, OLMo and Granite.
SPEAKERS = (
    "assistant", "developer", "system", "tool", "user",
    "function", "ipython", "observation", "environment", "document", "control",
)  # fmt: skip
BEFORE_A_QUESTION = ("system", "developer", "assistant")
OURS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict")  # arguments that are set here
BYTE_LEVEL_SPACE = "Ġ"  # as tokens of byte-level tokenizers spell it
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


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Put a system turn in front of a chat, unless it has one or `system` is None."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def with_own_system(messages: list[Message], system: str | None) -> list[Message]:
    """Put the system turn that a record names in front of its chat, which must not have another."""
    own = messages[0]["content"] if messages[0]["role"] == "system" else system
    if system is not None and own != system:
        raise ValueError(f"field `system` must be the chat's own system turn, got {system[:60]}: leave one out.")
    return with_system(messages, system)


def _read_message(given: Any, name: str) -> Message:
    message = {field: value for field, value in given.items() if value is not None} if isinstance(given, dict) else {}
    speaker = message.get("role")
    roles = dict(zip(SPEAKERS, SPEAKERS, strict=True))
    if "from" in message and speaker is None:
        speaker, roles = message.pop("from"), ROLES
        message["content"] = message.pop("value", None)
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str) or not isinstance(speaker, str):
        raise ValueError(f"{name} must have {SAID}, got {str(given)[:60]}.")
    if speaker not in roles:
        remedy = "Name the speaker so, or give the chat as it is rendered, as `prompt` and `completion`."
        raise refusal(f"{name}: the speaker", f"one of {', '.join(roles)}", speaker, remedy)
    return {"role": roles[speaker], **message, "content": content}


# --- token ids ----------------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """A turn to learn: its number, where in the text it begins, and the text up to its end."""

    number: int
    begin: int
    text: str


def encode_chat(
    messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any], start: int = 0
) -> list[Row]:
    """Render a conversation, and mark the assistant's tokens in the messages from `start` on.

    Rows are one, one more for every turn that the whole renders differently, and `UNTOLD` for every turn that does not
    begin as the template asks for it. A conversation whose turns carry no weight is one empty row.
    """
    roles = [message["role"] for message in messages]
    asked = next((number for number, role in enumerate(roles) if role not in BEFORE_A_QUESTION), 1)
    first = start or max(asked, 1)
    answers = [number for number, role in enumerate(roles) if role == "assistant" and number >= first]
    if not answers:
        raise ValueError(
            f"field `messages` must hold an assistant message that answers another, got none (one that opens "
            f"the chat does not). {UNANSWERED}"
        )
    turns, rows = _turns_of(messages, answers, tokenizer, template_kwargs)
    whole = _render(messages, tokenizer, template_kwargs)
    count = len(messages)
    while turns:
        shown = [turn for turn in turns if whole.startswith(turn.text)]
        if shown:
            spans = [(turn.begin, len(turn.text)) for turn in shown]
            blocks = _generation_blocks(messages[:count], tokenizer, template_kwargs)
            if blocks is not None:
                spans = [(max(begin, first), min(end, last)) for begin, end in spans for first, last in blocks]
            rows.append(_mark(whole, spans, tokenizer))
            turns = [turn for turn in turns if turn not in shown]
        if turns:
            whole, count = turns[-1].text, turns[-1].number + 1
    return rows or [dict(UNTOLD)]


def _turns_of(
    messages: list[Message], answers: list[int], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> tuple[list[_Turn], list[Row]]:
    """Find the turns that are learned, and an `UNTOLD` for each that does not begin as the template asks for it."""
    turns: list[_Turn] = []
    untold: list[Row] = []
    for number, message in enumerate(messages):
        with at(f"field `messages[{number}]`"):
            check_names(message, MESSAGE)
            learned = has_loss(message, can_learn=message["role"] == "assistant")
        if number not in answers or not learned:
            continue
        before = render_prompt(messages[:number], tokenizer, template_kwargs)
        after = _render(messages[: number + 1], tokenizer, template_kwargs)
        if not after.startswith(before):
            if not _has_generation_blocks(tokenizer):
                untold.append(UNTOLD)
                continue
            before = _render(messages[:number], tokenizer, template_kwargs)  # the blocks say where the turn begins
        turns.append(_Turn(number, len(before), after))
    return turns, untold


def encode_prompt(messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Encode a conversation up to where the assistant's next turn begins."""
    return tokenizer(render_prompt(messages, tokenizer, template_kwargs), add_special_tokens=False)["input_ids"]


def render_prompt(messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    """Render a conversation up to where the assistant's next turn begins."""
    return _render(messages, tokenizer, template_kwargs, add_generation_prompt=True)


def _mark(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> Row:
    """Encode a text, with the loss on the tokens that stand whole in one of the spans."""
    if not tokenizer.is_fast:
        raise ValueError(
            "field `messages` needs a fast tokenizer, which tells where its tokens stand in a text, got "
            f"{type(tokenizer).__name__}: save it as a fast one, or use `prompt` and `completion`."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, mask = encoded["input_ids"], []
    for token, (first, last) in zip(tokenizer.convert_ids_to_tokens(ids), encoded["offset_mapping"], strict=True):
        # A byte-level post-processor may leave spaces in front out of a token's place, and so all of a blank token's.
        spaces = len(token) - len(token.lstrip(BYTE_LEVEL_SPACE))
        is_trimmed = first == last or text[first] != " "
        begin = first - spaces if is_trimmed and text[first - spaces : first] == " " * spaces else first
        mask.append(int(any(start <= begin < last <= end for start, end in spans)))
    return {"input_ids": ids, "loss_mask": mask}


def _has_generation_blocks(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    return isinstance(template, str) and GENERATION_BLOCK.search(template) is not None


def _generation_blocks(
    messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> list[tuple[int, int]] | None:
    """Find where in a rendered conversation its generation blocks stand; None for a template without any."""
    if not _has_generation_blocks(tokenizer):
        return None
    arguments = {**tokenizer.special_tokens_map, **template_kwargs}
    _, (blocks,) = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, return_assistant_tokens_mask=True, **arguments
    )
    return blocks


def _render(
    messages: list[Message], tokenizer: Any, template_kwargs: Mapping[str, Any], add_generation_prompt: bool = False
) -> str:
    if ours := [name for name in OURS if name in template_kwargs]:
        raise refusal(
            "chat_template_kwargs", "variables of the chat template", ours[0], "Leave it out: it is set here."
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            "field `messages` needs a tokenizer with a chat template, and this one has none: "
            "set tokenizer.chat_template, or use `prompt` and `completion`."
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise ValueError(f"field `messages`: the chat template refuses it: {error}") from error
