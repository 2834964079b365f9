"""Load the names of a package when they are first used (PEP 562), so that importing the package is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def late(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Create the `__getattr__` and the `__dir__` of a package.

    Example:
    ```python
    >>> from hf_domino._common.late import late
    >>> load, names = late("hf_domino", {"DominoConfig": "methods"})
    >>> load("DominoConfig").__name__, "DominoConfig" in names()
    ('DominoConfig', True)

    ```
    """

    def load(name: str) -> Any:
        if name in names:
            value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("_"):
            try:
                return importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":  # the module exists, but imports one that does not
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names_of() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return load, names_of
