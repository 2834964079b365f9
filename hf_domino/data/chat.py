"""Conversations as token ids with the loss on assistant tokens only.

A chat template with a generation block says itself which tokens are the assistant's. For any other, the conversation
is rendered turn by turn, and what an assistant turn adds to its generation prompt is the assistant's. A turn that the
template renders differently once others follow (dropped reasoning) is learned from a row of its own that ends with it,
as the target would write it. A turn that opens the conversation carries no loss: the target writes none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\b")
Message = dict[str, Any]
Row = dict[str, list[int]]  # token ids, and a loss mask: 1 for the assistant's or 0
UNANSWERED = "Let the target write the answer (on_policy, --on-policy true), or leave the record out."
UNTOLD: Row = {"input_ids": [], "loss_mask": []}  # stands for a turn that cannot be told from what asks for it


def encode_chat(
    messages: Sequence[Message],
    tokenizer: Any,
    place: str = "messages",
    template_kwargs: Mapping[str, Any] | None = None,
    start: int = 0,
) -> list[Row]:
    """Render a conversation and mark the assistant's tokens.

    Args:
        messages (`Sequence[dict]`): Messages with `role` and `content`.
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        place (`str`, *optional*, defaults to `"messages"`): Where the conversation is from, for errors.
        template_kwargs (`Mapping`, *optional*): For the template, such as `{"enable_thinking": False}`, or `tools`.
        start (`int`, *optional*, defaults to 0): The first message that may carry loss.

    Returns:
        `list[dict]`: Rows of `input_ids` and `loss_mask`: one, and one more for every turn that the whole renders
        differently; and `UNTOLD` for every turn that does not begin as the template asks for it.

    Raises:
        ValueError: If no turn may carry loss, the tokenizer has no chat template or is slow, or the template refuses
            the conversation or does not show its tool calls.
    """
    messages, kwargs = list(messages), dict(template_kwargs or {})
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= max(start, 1)]
    if not turns:
        raise ValueError(
            f"{place}: field `messages` must hold an assistant message that answers another, got none (one that opens "
            f"the chat does not). {UNANSWERED}"
        )
    template = _template(tokenizer, place)
    if not (isinstance(template, str) and GENERATION_BLOCK.search(template)):
        return _encode_by_turns(messages, turns, tokenizer, place, kwargs)
    encoded = _render(
        messages, tokenizer, place, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **kwargs
    )
    ids, loss_mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if start:
        prompt = encode_prompt(messages[:start], tokenizer, place, kwargs)
        unlike = (index for index, (ours, theirs) in enumerate(zip(ids, prompt, strict=False)) if ours != theirs)
        length = next(unlike, min(len(ids), len(prompt)))
        loss_mask = [0] * length + loss_mask[length:]
    learnt = tokenizer.decode([token for token, counts in zip(ids, loss_mask, strict=True) if counts])
    for index in turns:
        _check_calls(messages, index, learnt, place)
    return [{"input_ids": ids, "loss_mask": loss_mask}]


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
    messages: list[Message], places: list[int], tokenizer: Any, place: str, kwargs: dict[str, Any]
) -> list[Row]:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{place}: field `messages` needs a fast tokenizer, which tells where its tokens stand in a text, got "
            f"{type(tokenizer).__name__}: save it as a fast one, or use `prompt` and `completion`."
        )
    shown: Callable[..., str] = partial(_render, tokenizer=tokenizer, place=place, tokenize=False, **kwargs)
    whole, turns, rows = shown(messages), [], []  # turns: the conversation as it is before one, and as it is with it
    for index in places:
        before, after = shown(messages[:index], add_generation_prompt=True), shown(messages[: index + 1])
        if not after.startswith(before):
            rows.append(UNTOLD)
            continue
        _check_calls(messages, index, after[len(before) :], place)
        turns.append((before, after))
    while turns:
        here = [turn for turn in turns if whole.startswith(turn[1])]
        if here:
            spans = [(len(before), len(after)) for before, after in here]
            encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
            offsets = encoded["offset_mapping"]
            mask = [int(any(start <= first < last <= end for start, end in spans)) for first, last in offsets]
            rows.append({"input_ids": encoded["input_ids"], "loss_mask": mask})
        turns = [turn for turn in turns if turn not in here]
        whole = turns[-1][1] if turns else ""
    return rows


def _check_calls(messages: Sequence[Message], index: int, learnt: str, place: str) -> None:
    """Refuse a turn whose tool calls are not in the text that is learnt: an end of text would be all of it."""
    if not all(call["function"]["name"] in learnt for call in messages[index].get("tool_calls", ())):
        raise ValueError(f"{place}: field `messages[{index}]`: the chat template does not show its `tool_calls`.")


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
