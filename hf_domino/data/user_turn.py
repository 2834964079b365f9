"""Where a user's turn begins and ends in a chat template: what a target needs to write such a turn itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.data.chat import Message, render_prompt

SENTINEL = "Sentinel7Question"  # a user's words that no template holds
WAY_OUT = "Pass prompts for it to answer (--prompts FILE)."


@dataclass(frozen=True)
class UserTurn:
    """A chat up to the user's first word, as token ids, and the tokens that end the turn."""

    opening: list[int]
    ends: tuple[int, ...]


def find_user_turn(
    tokenizer: Any, ends: Sequence[int], system: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> UserTurn:
    """Find the opening and the end of a user's turn by rendering one, behind a system turn where one is asked for.

    Raises:
        ValueError: If there is no chat template, or it has no place where a user's words alone would stand, or nothing
            but plain text ends them.
    """
    check_chat_template(tokenizer)
    messages = with_system([{"role": "user", "content": SENTINEL}], system)
    text = render_prompt(messages, tokenizer, "a chat of one question", template_kwargs)
    if text.count(SENTINEL) != 1:
        remedy = f"A user's turn cannot be left open in this template. {WAY_OUT}"
        raise refusal("the chat template", "one that shows a user's words once", text[:200], remedy)
    before, _, behind = text.partition(SENTINEL)
    closing = tokenizer(behind, add_special_tokens=False)["input_ids"]
    if not closing or closing[0] not in tokenizer.get_added_vocab().values():
        remedy = f"The target could not say where its own question ends. {WAY_OUT}"
        raise refusal("what ends a user's turn in the chat template", "a special token", behind[:40], remedy)
    opening = tokenizer(before, add_special_tokens=False)["input_ids"]
    return UserTurn(opening, tuple(dict.fromkeys((closing[0], *ends))))


def check_chat_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        remedy = "Use a chat model, or pass rows with `prompt` for it to continue (--prompts FILE --plain)."
        raise refusal("the target's chat template", "set, to write chats", None, remedy)


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """A chat with a system turn in front, unless it has one or none is asked for."""
    if system is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]
