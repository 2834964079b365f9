"""Conversations as token ids with the loss on assistant tokens only.

A chat template with a generation block says itself which tokens are the assistant's. For any other, the conversation
is rendered turn by turn, and what an assistant turn adds to its generation prompt is the assistant's. A turn that the
template renders differently once others follow (dropped reasoning) is learned from a row of its own that ends with it,
as the target would write it. A turn that opens the conversation carries no loss: the target writes none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
Message = dict[str, Any]
EncodedChat = tuple[list[int], list[int]]  # token ids, and 1 for the assistant's or 0


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Any,
    place: str = "messages",
    template_kwargs: Mapping[str, Any] | None = None,
    start: int = 0,
) -> list[EncodedChat]:
    """Render a conversation and mark the assistant's tokens.

    Args:
        messages (`Sequence[dict]`): Messages with `role` and `content`.
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        place (`str`, *optional*, defaults to `"messages"`): Where the conversation is from, for errors.
        template_kwargs (`Mapping`, *optional*): For the template, such as `{"enable_thinking": False}`.
        start (`int`, *optional*, defaults to 0): The first message that may carry loss.

    Returns:
        `list[tuple[list[int], list[int]]]`: Rows of token ids, and 1 for the assistant's or 0: one, and one more for
        every turn that the whole renders differently.

    Raises:
        ValueError: If the tokenizer has no chat template, the template refuses the conversation, or the assistant's
            tokens cannot be told.
    """
    messages, kwargs = list(messages), dict(template_kwargs or {})
    template = _template(tokenizer, place)
    if not (isinstance(template, str) and GENERATION_BLOCK.search(template)):
        return _encode_by_turns(messages, tokenizer, place, kwargs, start)
    encoded = _render(
        messages, tokenizer, place, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    ids, loss_mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if start:
        prompt = encode_prompt(messages[:start], tokenizer, place, kwargs)
        unlike = (index for index, (ours, theirs) in enumerate(zip(ids, prompt, strict=False)) if ours != theirs)
        length = next(unlike, min(len(ids), len(prompt)))
        loss_mask = [0] * length + loss_mask[length:]
    return [(ids, loss_mask)]


def encode_prompt(
    messages: Sequence[Message],
    tokenizer: Any,
    place: str = "messages",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation up to where the assistant's next turn begins.

    Raises:
        ValueError: If the tokenizer has no chat template, or the template refuses the conversation.
    """
    text = render_prompt(messages, tokenizer, place, template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render_prompt(
    messages: Sequence[Message],
    tokenizer: Any,
    place: str = "messages",
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """As [`encode_prompt`], the text before it is cut into tokens."""
    _template(tokenizer, place)
    kwargs = dict(template_kwargs or {})
    return _render(list(messages), tokenizer, place, tokenize=False, add_generation_prompt=True, **kwargs)


def _encode_by_turns(
    messages: list[Message], tokenizer: Any, place: str, kwargs: dict[str, Any], start: int
) -> list[EncodedChat]:
    whole = _render(messages, tokenizer, place, tokenize=False, **kwargs)
    turns = []  # of the assistant: the conversation as it is before, and as it is with it
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index >= max(start, 1):
            before = _render(messages[:index], tokenizer, place, tokenize=False, add_generation_prompt=True, **kwargs)
            after = _render(messages[: index + 1], tokenizer, place, tokenize=False, **kwargs)
            if after.startswith(before):
                turns.append((before, after))
    if not turns or not tokenizer.is_fast:
        raise ValueError(
            f"{place}: field `messages`: chat template or tokenizer do not tell which tokens are the assistant's. "
            "Use a template with {% generation %} blocks, or `prompt` and `completion`."
        )
    rows = []
    while turns:
        here = [turn for turn in turns if whole.startswith(turn[1])]
        if here:
            rows.append(_encode_spans(whole, [(len(before), len(after)) for before, after in here], tokenizer))
        turns = [turn for turn in turns if turn not in here]
        whole = turns[-1][1] if turns else ""
    return rows


def _encode_spans(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> EncodedChat:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [_inside(first, last, spans) for first, last in encoded["offset_mapping"]]


def _template(tokenizer: Any, place: str) -> Any:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{place}: field `messages` needs a tokenizer with a chat template, and this one has none: "
            "set tokenizer.chat_template, or use `prompt` and `completion`."
        )
    return tokenizer.chat_template


def _render(messages: list[Message], tokenizer: Any, place: str, **kwargs: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except Exception as error:  # a template is a program of its own, and may raise anything
        raise ValueError(f"{place}: field `messages`: the chat template refuses it: {error}") from error


def _inside(start: int, end: int, spans: list[tuple[int, int]]) -> int:
    return int(any(first <= start and end <= last and end > start for first, last in spans))
