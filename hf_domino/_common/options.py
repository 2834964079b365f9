"""Options that Python and the command line share: a dataclass declares each once, with default, help and flag."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

Described = TypeVar("Described", bound=type)
READ_BY = {"int": int, "float": float, "Path": Path}  # how a flag is read, by its field's type


def option(default: Any, help: str, **flag: Any) -> Any:
    """Declare a field by its default, its description, and what `argparse` takes for its flag beside these."""
    metadata = {"help": help, **flag}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def add_flags(group: argparse._ActionsContainer, options: type, title: str | None = None) -> None:
    """Add a flag for each field that has a description; with a `title`, for those of this group."""
    for each in _described(options):
        flag = dict(each.metadata)
        if flag.pop("group", None) != title:
            continue
        kind = str(each.type).removesuffix(" | None")
        if kind == "bool":
            flag["action"] = "store_true"
        elif kind in READ_BY:
            flag["type"] = READ_BY[kind]
        group.add_argument(f"--{each.name.replace('_', '-')}", default=_default(each), **flag)


def describe(described: Described, options: type | None = None) -> Described:
    """List the fields of `options`, by default of the class itself, as arguments in the docstring of a class."""
    text, raises, errors = inspect.cleandoc(described.__doc__ or "").partition("\n\nRaises:")
    text += "\n\nArgs:"
    for each in _described(options or described):
        default = "" if _default(each) is None else f", defaults to `{_default(each)!r}`"
        text += f"\n    {each.name} (`{each.type}`, *optional*{default}): {each.metadata['help']}"
    described.__doc__ = text + raises + errors
    return described


def _described(options: type) -> list[Field]:
    return [each for each in fields(options) if each.metadata]


def _default(each: Field) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()
