"""What the target is to answer: chats whose assistant turns it writes, and plain text that it continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino._common.refusal import refusal
from hf_domino.data.chat import Message
from hf_domino.data.filters import Exclusions, NearCopies
from hf_domino.data.messages import read_messages, read_tools
from hf_domino.data.records import RECORD_SUFFIXES, read_text
from hf_domino.data.sources import Source
from hf_domino.data.user_turn import with_system

ASSISTANT, USER, TOOL = "assistant", "user", "tool"
CHATS, TEXT = ("messages", "conversations", "prompt"), "text"  # those that may hold messages, and the one that cannot


@dataclass(frozen=True)
class Prompt:
    """A chat, or a plain text.

    Args:
        messages (`tuple[dict, ...]`, *optional*): A chat; it ends with a user's turn, or with an assistant's whose
            words are to be replaced.
        text (`str`, *optional*): A text to continue; one of both is given.
        tools (`dict`, *optional*): `tools` of the chat, for its template; empty where it has none.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What it asks, without what was answered: by this two prompts are compared."""
        return self.text or "\n".join(m["content"] for m in self.messages if m["role"] == USER)

    @property
    def flaw(self) -> str | None:
        """Why it cannot be answered: what a tool returned does not fit another call of it."""
        return "tool calls" if any(m["role"] == TOOL or m.get("tool_calls") for m in self.messages) else None

    @property
    def answers(self) -> list[int]:
        """Which messages are the target's to write; the last may be one past the end."""
        asked = next(index for index, message in enumerate(self.messages) if message["role"] == USER)  # else a greeting
        places = [i for i, m in enumerate(self.messages) if m["role"] == ASSISTANT and i > asked]
        return places if self.messages[-1]["role"] == ASSISTANT else [*places, len(self.messages)]


def read_prompts(source: Source, plain: bool, system: str | None = None) -> Iterator[Prompt]:
    """Read prompts from records.

    A record has `messages`, `conversations`, `prompt` as a string or as messages, or `text`, which is to be continued;
    its `completion` is not read.

    Raises:
        ValueError: If a record is not as described; naming its place.
    """
    if source.texts:
        remedy = 'Write one record a line, such as {"prompt": "..."}.'
        raise refusal("files of prompts", f"records ({', '.join(RECORD_SUFFIXES)})", str(source.texts[0]), remedy)
    for place, record in source.records():
        yield prompt_of(record, place, plain, system)


def texts_of(source: Source) -> Iterator[str]:
    """The prompts of an evaluation: what users say in chats, or the text itself.

    Raises:
        ValueError: If a record has none of them; naming its place.
    """
    for path in source.texts:
        yield "".join(read_text(path))
    for place, record in source.records():
        yield prompt_of(record, place).words


def prompt_of(record: Mapping[str, Any], place: str, plain: bool = False, system: str | None = None) -> Prompt:
    """The prompt of a record, as in [`read_prompts`].

    Raises:
        ValueError: If it holds no prompt.
    """
    field = next((name for name in (*CHATS, TEXT) if name in record), None)
    if field is None:
        found = ", ".join(f"`{name}`" for name in record) or "none"
        raise ValueError(f"{place}: needs {PROMPT_FIELDS}, got {found}.")
    value = record[field]
    if field == TEXT and not isinstance(value, str):
        raise ValueError(f"{place}: field `{TEXT}` must be a string, got {str(value)[:60]}.")
    if isinstance(value, str) and field in ("prompt", TEXT):
        if not value:
            raise ValueError(f"{place}: field `{field}` must not be empty.")
        if plain or field == TEXT:
            return Prompt(text=value)
        return Prompt(tuple(with_system([{"role": USER, "content": value}], system)))
    messages = read_messages(record, field, place)
    if all(message["role"] != USER for message in messages):
        raise ValueError(f"{place}: field `{field}` must hold a user's message, got none.")
    if messages[-1]["role"] not in (USER, ASSISTANT, TOOL):
        expected = "a user's, or an assistant's that is written anew"
        raise refusal(
            f"{place}: field `{field}`: the last message", expected, messages[-1]["role"], "Cut the chat before it."
        )
    return Prompt(tuple(with_system(messages, system)), tools=read_tools(record, place))


class Sieve:
    """Keeps prompts that are new and not excluded, and counts why others fell.

    Args:
        exclusions (`Exclusions`): What they must not overlap.

    Attributes:
        kept (`list[Prompt]`): Those that stayed.
        dropped (`Counter`): Others by reason.
    """

    def __init__(self, exclusions: Exclusions):
        self.kept: list[Prompt] = []
        self.dropped: Counter[str] = Counter()
        self._exclusions, self._copies = exclusions, NearCopies()

    def add(self, prompt: Prompt, flaw: str | None = None) -> None:
        """Keep a prompt, unless it is known to have a flaw, or count why not."""
        if flaw is None and self._exclusions.overlap(prompt.words):
            flaw = "excluded"
        if flaw := flaw or self._copies.add(prompt.words):
            self.dropped[flaw] += 1
        else:
            self.kept.append(prompt)
