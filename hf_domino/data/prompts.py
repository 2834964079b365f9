"""Read prompts for the target: chats, whose assistant turns it will write, and plain text, which it will continue.

All commands read prompts here, so that a record means the same to each of them. `bundled` holds prompts that were
written for this project: questions about everyday matters, code and maths for a chat model, and beginnings of texts for
others.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.data.chat import (
    Message,
    field_of,
    read_messages,
    read_string,
    render_chat,
    with_own_system,
    with_system,
)
from hf_domino.data.encoding import encode_text
from hf_domino.data.filters import Exclusions, words_of
from hf_domino.data.names import (
    CHAT,
    PROMPT,
    TEXT,
    Fields,
    check_names,
    read_system,
    read_template_fields,
    template_arguments,
)
from hf_domino.data.records import at, check_file, read_records

ASSISTANT = "assistant"
USER = "user"
TOOL = "tool"
BUNDLED = Path(__file__).with_name("bundled")
QUESTIONS = ("chat", "code", "maths")  # files of prompts in it, by the words that name them
BEGINNINGS = "text"
Asked = dict[str, Any]  # a prompt as a record that has `text` to continue, or `messages` to answer


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
    """Read the prompt of a record with `messages`, `conversations`, `prompt` (a string or messages) or `text`.

    A `prompt` that is a string is a user's turn, or with `plain`, which a target without a chat template needs, a text
    to continue.
    """
    with at(place):
        field = field_of(record, PROMPT_FIELDS)
        if field == "text" or (field == "prompt" and isinstance(record[field], str)):
            text = read_string(record, field)
            if not text:
                raise ValueError(f"field `{field}` must not be empty.")
            # Token ids stand beside a text that the target continued, in files that `hf-domino data` wrote.
            if plain or field == "text" or "input_ids" in record:
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


def prompt_file(name: str | Path, flag: str = "--prompts") -> Path:
    """Return a file of prompts that is given by its path, or by the word for a bundled one; errors name the flag."""
    path = Path(name)
    if str(name) in (*QUESTIONS, BEGINNINGS) and not path.exists():
        return BUNDLED / f"{name}.jsonl"
    check_file(path, flag)
    return path


def read_prompts(path: str | Path, is_chat: bool = False) -> list[Asked]:
    """Read the prompts of a file as records that have `text` to continue or `messages` to answer.

    Args:
        path (`str` or `Path`): The file, or a word that names a bundled one: `chat`, `code`, `maths` or `text`.
        is_chat (`bool`, *optional*, defaults to `False`): Whether the target has a chat template, with which a `prompt`
            that is a string is a user's turn.

    Raises:
        ValueError: If there is no such file, or a record holds no prompt.
    """
    path = prompt_file(path)
    prompts = []
    for place, record in read_records(path):
        prompt = prompt_of(record, place, plain=not is_chat)
        asked: Asked = {"text": prompt.text}
        messages = list(prompt.messages)
        if messages:
            # Chats in the `evaluation.jsonl` of `hf-domino data` end with an answer, which is not part of the prompt.
            if messages[-1]["role"] == ASSISTANT:
                messages.pop()
            asked = {"messages": messages}
        prompts.append(record | prompt.fields | asked)
    if not prompts:
        raise ValueError(f"--prompts must hold at least one prompt, got none in {path}.")
    return prompts


def bundled_prompts(is_chat: bool) -> list[Asked]:
    """Return the bundled prompts: questions of all kinds in turn for a chat model, else beginnings of texts."""
    if not is_chat:
        return read_prompts(BUNDLED / f"{BEGINNINGS}.jsonl")
    kinds = [read_prompts(BUNDLED / f"{kind}.jsonl", is_chat) for kind in QUESTIONS]
    return list(itertools.chain.from_iterable(zip(*kinds, strict=True)))


def encode_prompt(prompt: Asked, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Return the token ids of a prompt, up to where the target goes on.

    Args:
        prompt (`dict`): A record with `text`, or with `messages` and the fields for the chat template.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        template_kwargs (`Mapping`, *optional*): Variables for the chat template, unless the record sets them.
    """
    if "messages" not in prompt:
        return encode_text(prompt["text"], tokenizer, goes_on=True)
    check_answers_messages(tokenizer)
    arguments = {**(template_kwargs or {}), **template_arguments(read_template_fields(prompt))}
    text = render_chat(list(prompt["messages"]), tokenizer, arguments, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_answers_messages(tokenizer: Any) -> None:
    """Raise a `ValueError` if a tokenizer has no chat template, which prompts with `messages` need."""
    if getattr(tokenizer, "chat_template", None) is None:
        remedy = "Give prompts with `prompt` or `text`, which the target continues."
        raise invalid_argument("the target's chat template", "set for prompts with `messages`", None, remedy)


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
