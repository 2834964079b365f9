"""Tasks that come with a text: notes, code, sentences and passages, put together from the lists of a YAML file.

A small chat model that writes its own prompts asks short questions. Users also bring something to be extracted,
rewritten, translated or explained, and go on asking.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from hf_domino._common.atomic_writes import write_atomic

PHRASES = Path(__file__).with_name("smollm2_tasks.yaml")
PLACE = re.compile(r"\{(\w+)\}")
SENTENCE_END = re.compile(r"(?<=[.!?])\s")
FOLLOWED_SHARE = 0.3  # of tasks, that the user goes on after
PASSAGE_CHARACTERS = range(150, 700)
FUNCTION_LINES = range(4, 19)
FUNCTION_CHARACTERS = 700


def write_tasks(chats: Path, output: Path, count: int, seed: int) -> Path:
    """Write a file of prompts, `messages` each, unless it is there; passages are answers of `chats`."""
    if not output.exists():
        lists = yaml.safe_load(PHRASES.read_text(encoding="utf-8"))
        tasks = Tasks(lists, read_passages(chats), read_functions(), random.Random(seed))
        lines = [json.dumps({"messages": tasks.messages()}, ensure_ascii=False) for _ in range(count)]
        write_atomic(output, "".join(f"{line}\n" for line in lines))
    return output


class Tasks:
    """Puts tasks together from phrases by name, in which a name in braces stands for one of them, passages and code."""

    def __init__(
        self, lists: dict[str, list[str]], passages: Sequence[str], functions: Sequence[str], generator: random.Random
    ):
        self.lists, self.generator = lists, generator
        self._made: dict[str, Callable[[], str]] = {
            "number": lambda: str(generator.choice((generator.randint(3, 20), generator.randint(21, 999)))),
            "year": lambda: str(generator.randint(1900, 2020)),
            "passage": partial(generator.choice, passages),
            "sentence": lambda: SENTENCE_END.split(generator.choice(passages))[0],
            "code": partial(generator.choice, functions),
        }

    def messages(self) -> list[dict[str, str]]:
        """A task, and often what the user says next; the answer between them is still to be written."""
        asked = [self.say("task")]
        if self.generator.random() < FOLLOWED_SHARE:
            asked += ["", self.say("follow_up")]
        roles = ("user", "assistant", "user")
        return [{"role": role, "content": text} for role, text in zip(roles, asked, strict=False)]

    def say(self, name: str) -> str:
        """One of the phrases of a name, its own names replaced."""
        make = self._made.get(name)
        if make is not None:
            return make()
        return PLACE.sub(lambda found: self.say(found[1]), self.generator.choice(self.lists[name]))


def read_passages(chats: Path) -> list[str]:
    """The beginnings of answers, whole sentences each."""
    answers = [json.loads(line)["messages"][-1]["content"] for line in chats.read_text(encoding="utf-8").splitlines()]
    passages = map(_beginning, answers)
    return [passage for passage in passages if len(passage) in PASSAGE_CHARACTERS]


def _beginning(text: str) -> str:
    whole = ""
    for sentence in SENTENCE_END.split(text.strip()):
        if len(whole) + len(sentence) > PASSAGE_CHARACTERS.stop // 2:
            break
        whole = f"{whole} {sentence}".strip()
    return whole


@cache
def read_functions() -> tuple[str, ...]:
    """Short functions of the standard library, as they are written there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return tuple(code for path in sorted(folder.glob("*.py")) for code in _functions_of(path))


def _functions_of(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
        nodes: list[Any] = ast.parse(text).body
    except (SyntaxError, UnicodeDecodeError):  # those that test the parser
        return
    lines = text.split("\n")
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 in FUNCTION_LINES:  # type: ignore[operator]
            *whole, last = lines[node.lineno - 1 : node.end_lineno]
            code = "\n".join([*whole, last.encode()[: node.end_col_offset].decode()])  # no comment behind it
            if len(code) <= FUNCTION_CHARACTERS:
                yield code
