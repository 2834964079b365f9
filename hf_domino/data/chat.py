"""Read conversations in the formats of common data sets, and encode them with the loss on the assistant's tokens.

The conversation is rendered turn by turn. Whatever an assistant turn adds to its generation prompt belongs to the
assistant, unless the chat template has generation blocks, which mark that part themselves. Some templates render a turn
differently once other turns follow, because they drop its reasoning. Such a turn is learned from a separate example
that ends with it, the way the target would write it. An assistant turn that opens the conversation carries no loss,
because the target never writes one.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from hf_domino._common.errors import invalid_argument
from hf_domino.data.names import MESSAGE, Fields, check_names, has_loss
from hf_domino.data.records import at

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
Message = dict[str, Any]
Example = dict[str, list[int]]  # token ids, and a loss mask that is 1 on the assistant's tokens and 0 elsewhere
UNANSWERED = "Let the target write the answer (hf-domino data), or leave the record out."
UNALIGNABLE: Example = {"input_ids": [], "loss_mask": []}  # for a turn that does not begin with its generation prompt
# Speakers of ShareGPT-like records -> roles of chat templates.
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
# Roles that chat templates on the Hub use; the ones in the last line come from Llama 3, GLM-4, OLMo and Granite.
SPEAKERS = (
    "assistant", "developer", "system", "tool", "user",
    "function", "ipython", "observation", "environment", "document", "control",
)  # fmt: skip
BEFORE_A_QUESTION = ("system", "developer", "assistant")
OURS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict")  # arguments that this module sets
BYTE_LEVEL_SPACE = "Ġ"  # how byte-level tokenizers spell a space
MESSAGE_FIELDS = "`role` and `content`, which must be text (or null beside `tool_calls`)"


# --- messages -----------------------------------------------------------------------------------------------------


def field_of(record: Fields, needed: str) -> str:
    """Find the field that holds the text or chat of a record."""
    for name in ("messages", "conversations", "prompt", "text"):
        if name in record:
            return name
    raise ValueError(f"needs {needed}, got {', '.join(f'`{name}`' for name in record) or 'none'}.")


def read_string(record: Fields, field: str) -> str:
    """Read a field that must be a string."""
    value = record.get(field)
    if not isinstance(value, str):
        raise ValueError(f"field `{field}` must be a string, got {str(value)[:60]}.")
    value.encode()  # an error for half a surrogate pair, which no tokenizer takes
    return value


def read_messages(record: Fields, field: str) -> list[Message]:
    """Read the messages of a record, each with a `role` and a `content` that is a string.

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
    """Put a system turn in front of a chat, unless the chat has one or `system` is None."""
    if system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def with_own_system(messages: list[Message], system: str | None) -> list[Message]:
    """Put the system turn from a record's own field in front of its chat, which must not have a different one."""
    own = messages[0]["content"] if messages[0]["role"] == "system" else system
    if system is not None and own != system:
        raise ValueError(
            f"field `system` must equal the chat's own system turn, got {system[:60]}: leave one of them out."
        )
    return with_system(messages, system)


def _read_message(given: Any, name: str) -> Message:
    message = {}
    if isinstance(given, dict):
        message = {field: value for field, value in given.items() if value is not None}
    speaker = message.get("role")
    roles = {name: name for name in SPEAKERS}
    if "from" in message and speaker is None:
        speaker = message.pop("from")
        roles = ROLES
        message["content"] = message.pop("value", None)
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str) or not isinstance(speaker, str):
        raise ValueError(f"{name} must have {MESSAGE_FIELDS}, got {str(given)[:60]}.")
    content.encode()
    if speaker not in roles:
        remedy = "Rename the speaker, or give the rendered chat as `prompt` and `completion`."
        raise invalid_argument(f"{name}: the speaker", f"one of {', '.join(roles)}", speaker, remedy)
    return {"role": roles[speaker], **message, "content": content}


# --- token ids ----------------------------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """A turn to learn: its number, where the target's words begin and end in the text, and the text with the turn."""

    number: int
    begin: int
    end: int
    text: str


def encode_chat(messages: list[Message], tokenizer: Any, template_kwargs: Fields, start: int = 0) -> list[Example]:
    """Render a conversation, and mark the assistant's tokens in the messages from `start` on.

    Most conversations give one example. Each turn that the template renders differently within the whole conversation
    adds another example, and each turn that does not begin with its generation prompt adds `UNALIGNABLE`. If no turn
    has a weight above 0, the result is one empty example.
    """
    roles = [message["role"] for message in messages]
    asked = next((number for number, role in enumerate(roles) if role not in BEFORE_A_QUESTION), 1)
    first = start or max(asked, 1)
    answers = [number for number, role in enumerate(roles) if role == "assistant" and number >= first]
    if not answers:
        raise ValueError(
            "field `messages` must hold an assistant message that answers another one, got none (a message that opens "
            f"the chat does not count). {UNANSWERED}"
        )
    turns, examples = _turns_of(messages, answers, tokenizer, template_kwargs)
    whole = render_chat(messages, tokenizer, template_kwargs)
    count = len(messages)
    while turns:
        shown = [turn for turn in turns if whole.startswith(turn.text)]
        if shown:
            spans = [(turn.begin, turn.end) for turn in shown]
            if _has_generation_blocks(tokenizer):
                arguments = {**tokenizer.special_tokens_map, **template_kwargs}
                _, (blocks,) = render_jinja_template(
                    [messages[:count]],
                    chat_template=tokenizer.chat_template,
                    return_assistant_tokens_mask=True,
                    **arguments,
                )
                spans = [(max(begin, first), min(end, last)) for begin, end in spans for first, last in blocks]
            examples.append(_mark(whole, spans, tokenizer))
            turns = [turn for turn in turns if turn not in shown]
        if turns:
            whole = turns[-1].text
            count = turns[-1].number + 1
    return examples or [dict(UNALIGNABLE)]


def _turns_of(
    messages: list[Message], answers: list[int], tokenizer: Any, template_kwargs: Fields
) -> tuple[list[_Turn], list[Example]]:
    """Find the turns to learn, and an `UNALIGNABLE` for each turn that does not begin with its generation prompt."""
    turns: list[_Turn] = []
    unalignable: list[Example] = []
    for number, message in enumerate(messages):
        with at(f"field `messages[{number}]`"):
            check_names(message, MESSAGE)
            learned = has_loss(message, can_learn=message["role"] == "assistant")
        if number not in answers or not learned:
            continue
        before = render_chat(messages[:number], tokenizer, template_kwargs, add_generation_prompt=True)
        after = render_chat(messages[: number + 1], tokenizer, template_kwargs)
        if not after.startswith(before):
            if not _has_generation_blocks(tokenizer):
                unalignable.append(UNALIGNABLE)
                continue
            before = render_chat(messages[:number], tokenizer, template_kwargs)  # the blocks say where the turn begins
        turns.append(_Turn(number, len(before), _end_of_words(after, tokenizer), after))
    return turns, unalignable


def _end_of_words(text: str, tokenizer: Any) -> int:
    """Return where the words of a text end that ends with a turn: whitespace behind an end token is the template's."""
    words = text.rstrip()
    ends_itself = any(words.endswith(token) for token in tokenizer.get_added_vocab())
    return len(words) if ends_itself else len(text)


def _mark(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> Example:
    """Encode a text, with the loss on the tokens that lie entirely in one of the spans."""
    if not tokenizer.is_fast:
        raise ValueError(
            "field `messages` needs a fast tokenizer, which knows where its tokens are in a text, got "
            f"{type(tokenizer).__name__}: save it as a fast tokenizer, or use `prompt` and `completion`."
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    mask = []
    for token, (first, last) in zip(tokenizer.convert_ids_to_tokens(ids), encoded["offset_mapping"], strict=True):
        # A byte-level post-processor can leave leading spaces out of a token's offsets, even a whole token of spaces.
        spaces = len(token) - len(token.lstrip(BYTE_LEVEL_SPACE))
        is_trimmed = first == last or text[first] != " "
        if is_trimmed and text[first - spaces : first] == " " * spaces:
            first -= spaces
        mask.append(int(any(start <= first < last <= end for start, end in spans)))
    return {"input_ids": ids, "loss_mask": mask}


def _has_generation_blocks(tokenizer: Any) -> bool:
    template = tokenizer.chat_template
    return isinstance(template, str) and GENERATION_BLOCK.search(template) is not None


def render_chat(
    messages: list[Message], tokenizer: Any, template_kwargs: Fields, add_generation_prompt: bool = False
) -> str:
    """Render a conversation; with `add_generation_prompt`, the text ends where the assistant's next turn begins."""
    if ours := [name for name in OURS if name in template_kwargs]:
        raise invalid_argument(
            "chat_template_kwargs",
            "variables of the chat template",
            ours[0],
            "Leave it out, because hf_domino sets it.",
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
    except Exception as error:  # a template is a program, which can raise anything
        raise ValueError(f"field `messages`: the chat template rejects it: {error}") from error
