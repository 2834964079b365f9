"""Declare options for Python and the command line once, as dataclass fields with a default, a help text and a flag."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, TypeVar

Described = TypeVar("Described", bound=type)
READ_BY = {"int": int, "float": float, "Path": Path}  # type of a field -> function that parses its flag


def option(default: Any, help: str, **flag: Any) -> Any:
    """Declare a field with its default, its help text, and further arguments of `add_argument` for its flag.

    A flag is called like its field, unless `name` is given.
    """
    metadata = {"help": help, **flag}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


# How a flag for true or false is shown if it takes the value.
TRUE_OR_FALSE: Any = {"nargs": "?", "metavar": "true|false"}


def add_flags(
    group: argparse._ActionsContainer, options: type, title: str | None = None, has_switches: bool = True
) -> None:
    """Add a flag for each option of the group called `title`; by default, for the options that have no group.

    An option that is true or false is a switch, or without `has_switches` a flag that takes the value.
    """
    for each in _described(options):
        flag = dict(each.metadata)
        if flag.pop("group", None) != title:
            continue
        # `HfArgumentParser` replaces the names of types by the types themselves.
        type_name = each.type.__name__ if isinstance(each.type, type) else str(each.type).removesuffix(" | None")
        if type_name == "bool":
            flag |= {"action": "store_true"} if has_switches else TRUE_OR_FALSE
        elif type_name in READ_BY:
            flag["type"] = READ_BY[type_name]
        flag.pop("name", None)
        group.add_argument(flag_of(each), dest=each.name, default=_default(each), **flag)


def flag_of(each: Field) -> str:
    """Return the flag of an option."""
    name = each.metadata.get("name", each.name)
    return f"--{name.replace('_', '-')}"


def describe(described: Described, options: type | None = None) -> Described:
    """Add the fields of `options`, or of the class itself, to the docstring of the class as its `Args` section."""
    text, raises, errors = inspect.cleandoc(described.__doc__ or "").partition("\n\nRaises:")
    text += "\n\nArgs:"
    for each in _described(options or described):
        default = ""
        if _default(each) is not None:
            default = f", defaults to `{_default(each)!r}`"
        text += f"\n    {each.name} (`{each.type}`, *optional*{default}): {each.metadata['help']}"
    described.__doc__ = text + raises + errors
    return described


def _described(options: type) -> list[Field]:
    return [each for each in fields(options) if each.metadata]


def _default(each: Field) -> Any:
    if each.default_factory is MISSING:
        return each.default
    return each.default_factory()
