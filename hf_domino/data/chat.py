"""Conversations as token ids with the loss on assistant tokens only.

A chat template with a generation block says itself which tokens are the assistant's. For any other, the conversation
is rendered turn by turn, and what an assistant turn adds to its generation prompt is the assistant's. Turns that the
template renders differently once others follow (dropped reasoning) carry no loss, nor does one that opens the
conversation: the target writes none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")


def encode_chat(
    messages: Sequence[dict[str, Any]], tokenizer: Any, place: str = "messages"
) -> tuple[list[int], list[int]]:
    """Render a conversation and mark the assistant's tokens.

    Args:
        messages (`Sequence[dict]`): Messages with `role` and `content`.
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        place (`str`, *optional*, defaults to `"messages"`): Where the conversation is from, for errors.

    Returns:
        `tuple[list[int], list[int]]`: Token ids, and 1 for the assistant's or 0.

    Raises:
        ValueError: If the tokenizer has no chat template, the template refuses the conversation, or the assistant's
            tokens cannot be told.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ValueError(
            f"{place}: field `messages` needs a tokenizer with a chat template, and this one has none: "
            "set tokenizer.chat_template, or use `prompt` and `completion`."
        )
    if isinstance(template, str) and GENERATION_BLOCK.search(template):
        encoded = _render(
            list(messages), tokenizer, place, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoded["input_ids"]), list(encoded["assistant_masks"])
    return _encode_by_turns(list(messages), tokenizer, place)


def _encode_by_turns(messages: list[dict[str, Any]], tokenizer: Any, place: str) -> tuple[list[int], list[int]]:
    whole = _render(messages, tokenizer, place, tokenize=False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        before = _render(messages[:index], tokenizer, place, tokenize=False, add_generation_prompt=True)
        after = _render(messages[: index + 1], tokenizer, place, tokenize=False)
        # Some templates drop the reasoning of earlier turns; such a turn is context, not what the target would write.
        if whole.startswith(after) and after.startswith(before):
            spans.append((len(before), len(after)))
    if not spans or not tokenizer.is_fast:
        raise ValueError(
            f"{place}: field `messages`: chat template or tokenizer do not tell which tokens are the assistant's. "
            "Use a template with {% generation %} blocks, or `prompt` and `completion`."
        )
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [_inside(first, last, spans) for first, last in encoded["offset_mapping"]]


def _render(messages: list[dict[str, Any]], tokenizer: Any, place: str, **kwargs: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise ValueError(f"{place}: field `messages`: the chat template refuses it: {error}") from error


def _inside(start: int, end: int, spans: list[tuple[int, int]]) -> int:
    return int(any(first <= start and end <= last and end > start for first, last in spans))
