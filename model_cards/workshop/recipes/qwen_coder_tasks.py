"""Prompts for code: phrases from the lists of a YAML file, and functions of the standard library where they need code.

A hash of a module's name says whether its functions are held out, as everywhere in this workshop.
"""

from __future__ import annotations

import ast
import itertools
import json
import random
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import yaml

from hf_domino._common.atomic_writes import write_atomic
from recipes.corpus import SKIPPED_DIRECTORIES, Module
from recipes.smollm2_tasks import FUNCTION_CHARACTERS, FUNCTION_LINES, Tasks

PHRASES = Path(__file__).with_name("qwen_coder_tasks.yaml")
EDIT_LINES, NUM_EDITS = range(22, 41), 24
EDITS = (
    "Add type hints to this code. Return the whole code.",
    "Add a docstring where one is missing, and change nothing else. Return the whole code.",
    "Rename every local variable `i` to `index`. Return the whole code.",
    "Turn %-formatting and `format` into f-strings. Return the whole code.",
    "Remove all comments. Return the whole code.",
    "Add a line that logs each call with the `logging` module. Return the whole code.",
    "Translate the comments and docstrings into German. Return the whole code.",
    "Use single quotes for all strings. Return the whole code.",
    "Check the arguments and raise a ValueError where one is None. Return the whole code.",
    "Here is a piece of my code. Repair spelling in comments and docstrings and change nothing else:",
)
NEW_NAMES = ("value", "source", "options", "entry", "target_path", "count", "buffer", "handler")
CHANGES = (
    "Rename `{name}` to `{new}` everywhere. Return the whole function.",
    "Rename the parameter `{name}` to `{new}`:",
    "Replace the name `{name}` by `{new}` and change nothing else:",
    "Add a parameter `verbose=False` that prints what happens. Return the whole function.",
    "Add type hints. Return the whole function.",
    "Add a check that raises ValueError if `{name}` is None. Return the whole function.",
    "Rewrite this so that it is easier to read:",
    "Turn every comment into a proper sentence, and change nothing else:",
    "Log a warning with the `logging` module where something is wrong. Return the whole function.",
    "Return a copy of this function called `{function}_2` that does the same:",
)
MISTAKES = (
    (" == ", " = "), ("return ", ""), (":\n", "\n"), ("not ", ""), (" + 1", ""), ("[0]", "[1]"), (" < ", " > "),
    ("self.", ""), ("len(", "("), (" is None", " == 0"), ("True", "False"), (" and ", " or "),
)  # fmt: skip


def write_edits(path: Path) -> Path:
    """Write the edits, unless they are there: whole lines of held-out modules, and what is to change in them."""
    if not path.exists():
        rows = []
        for change, (name, code) in zip(itertools.cycle(EDITS), _pieces(), strict=False):
            text = f"{change}\n\n```python\n{code}\n```"
            rows.append(json.dumps({"module": name, "messages": [{"role": "user", "content": text}]}) + "\n")
        write_atomic(path, "".join(rows))
    return path


def _pieces() -> list[tuple[str, str]]:
    """The longest function or class of each held-out module that fits an edit, of as many modules as there are edits.

    They are spread over the modules in their order.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        codes = list(_definitions(path, root, True, (ast.FunctionDef, ast.ClassDef), EDIT_LINES))
        if codes:
            found.append((path.relative_to(root).as_posix(), max(codes, key=len)))
    step = len(found) // NUM_EDITS
    return found[: step * NUM_EDITS : step]


class CodeTasks(Tasks):
    """Tasks of one turn, with functions in them, parts of these, and changes that fit them."""

    def __init__(self, generator: random.Random, found: tuple[str, ...]):
        super().__init__(yaml.safe_load(PHRASES.read_text(encoding="utf-8")), (), found, generator)
        documented = tuple(filter(None, map(stub_of, found)))
        made: dict[str, Callable[[], str]] = {
            "stub": partial(generator.choice, documented),
            "head": lambda: self._head(generator.choice(found)),
            "edit": lambda: self._edit(generator.choice(found)),
            "broken": lambda: self._broken(generator.choice(found)),
        }
        self._made |= made

    def messages(self) -> list[dict[str, str]]:
        """A task of one turn."""
        return [{"role": "user", "content": self.say("task")}]

    def _head(self, code: str) -> str:
        """The first half of a function."""
        lines = code.split("\n")
        return "\n".join(lines[: max(2, len(lines) // 2)])

    def _edit(self, code: str) -> str:
        node = ast.parse(code).body[0]
        assert isinstance(node, ast.FunctionDef)
        arguments = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
        usable = [change for change in CHANGES if arguments or "{name}" not in change]
        change = self.generator.choice(usable)
        names = {"function": node.name, "new": self.generator.choice(NEW_NAMES)}
        if arguments:
            names["name"] = self.generator.choice(arguments)
        return f"{change.format(**names)}\n\n```python\n{code}\n```"

    def _broken(self, code: str) -> str:
        """A function with a mistake in it."""
        usable = [(right, wrong) for right, wrong in MISTAKES if right in code]
        if usable:
            code = code.replace(*self.generator.choice(usable), 1)
        return code


@cache
def functions(held_out: bool) -> tuple[str, ...]:
    """Short functions and methods of the standard library, as they are written there, but for their indentation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (
        code
        for path in sorted(root.rglob("*.py"))
        for code in _definitions(path, root, held_out, (ast.FunctionDef,), FUNCTION_LINES)
        if len(code) <= FUNCTION_CHARACTERS
    )
    return tuple(dict.fromkeys(found))


def _definitions(
    path: Path, root: Path, held_out: bool, kinds: tuple[type[ast.stmt], ...], lengths: range
) -> Iterator[str]:
    """What a module defines of some kinds, with a number of lines in `lengths`, if it is held out or if it is not."""
    name = path.relative_to(root)
    if SKIPPED_DIRECTORIES.intersection(name.parts[:-1]) or name.name.startswith("test"):
        return
    if Module("stdlib", name.as_posix(), "").held_out is not held_out:
        return
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):  # those that test the parser
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, kinds) and node.end_lineno is not None and node.end_lineno - node.lineno + 1 in lengths:
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if _parses(code):
                yield code


def _parses(code: str) -> bool:
    """Whether it can be read by itself; strings with less indentation can break it."""
    try:
        return bool(ast.parse(code).body)
    except SyntaxError:
        return False


def stub_of(code: str) -> str | None:
    """The head of a function up to the end of its docstring, or None if it has none."""
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef)
    if ast.get_docstring(node) is None or len(node.body) < 2:
        return None
    return "\n".join(code.split("\n")[: node.body[0].end_lineno])
