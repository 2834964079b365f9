"""Read prompts for the target: chats, whose assistant turns it will write, and plain text, which it will continue."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.data.chat import Message, field_of, read_messages, read_string, with_own_system, with_system
from hf_domino.data.filters import Exclusions, words_of
from hf_domino.data.names import CHAT, PROMPT, TEXT, Fields, check_names, read_system, read_template_fields
from hf_domino.data.records import at

ASSISTANT = "assistant"
USER = "user"
TOOL = "tool"


@dataclass(frozen=True)
class Prompt:
    """A plain text, or a chat that ends with a user's turn or with an assistant's turn that will be replaced.

    `fields` holds the fields of its record that are arguments of the chat template, such as `tools`.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The user's words, or the text; prompts are compared by them."""
        return self.text or "\n".join(m["content"] for m in self.messages if m["role"] == USER)

    @property
    def drop_reason(self) -> str | None:
        """Why the prompt cannot be answered, or None: the recorded answer of a tool would not fit a new call."""
        if any(m["role"] == TOOL or m.get("tool_calls") for m in self.messages):
            return "tool calls"
        return None

    @property
    def turns(self) -> list[list[Message]]:
        """The messages before each answer; an assistant's message that opens the chat is a greeting, not an answer."""
        turns: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] == ASSISTANT and (turns[1:] or any(m["role"] == USER for m in turns[0])):
                turns.append([])
            else:
                turns[-1].append(message)
        if turns[1:] and not turns[-1]:
            turns.pop()
        return turns


def prompt_of(record: Fields, place: str, plain: bool = False, system: str | None = None) -> Prompt:
    """Read the prompt of a record with `messages`, `conversations`, `prompt` (a string or messages) or `text`."""
    with at(place):
        field = field_of(record, PROMPT_FIELDS)
        if field == "text" or (field == "prompt" and isinstance(record[field], str)):
            text = read_string(record, field)
            if not text:
                raise ValueError(f"field `{field}` must not be empty.")
            if plain or field == "text":
                check_names(record, TEXT, changes=(PROMPT,))
                return Prompt(text=text)
            messages = [{"role": USER, "content": text}]
        else:
            messages = read_messages(record, field)
        check_names(record, CHAT, changes=(PROMPT,))
        messages = with_own_system(messages, read_system(record))
        if all(message["role"] != USER for message in messages):
            raise ValueError(f"field `{field}` must hold a user's message, got none.")
        last = messages[-1]["role"]
        if last not in (USER, ASSISTANT, TOOL):
            expected = "a user's, or an assistant's that is written anew"
            raise invalid_argument(f"field `{field}`: the last message", expected, last, "Cut the chat before it.")
        return Prompt(tuple(with_system(messages, system)), fields=read_template_fields(record))


class PromptFilter:
    """Keeps prompts that are new and not excluded in `kept`, and counts the reasons for the others in `dropped`."""

    def __init__(self, exclusions: Exclusions):
        self.kept: list[Prompt] = []
        self.dropped: Counter[str] = Counter()
        self._exclusions = exclusions
        self._seen: set[tuple[str, ...]] = set()

    def add(self, prompt: Prompt, drop_reason: str | None) -> None:
        """Keep a prompt, or count why it is dropped; the caller can pass a reason."""
        words = words_of(prompt.words)
        if drop_reason is None and self._exclusions.overlap(prompt.words):
            drop_reason = "excluded"
        elif drop_reason is None and words in self._seen:
            drop_reason = "copy"
        if drop_reason is not None:
            self.dropped[drop_reason] += 1
        else:
            self._seen.add(words)
            self.kept.append(prompt)
