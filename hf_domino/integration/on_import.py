"""Run an action on a module as soon as it is imported: at once if it already is, else right after its own code.

Patching a module requires the module, but importing Transformers' generation only for that would cost seconds in every
program that imports this package. An action must not import anything from Transformers, because its modules import each
other in circles.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _Watcher(MetaPathFinder):
    """Finder that lets the other finders find the awaited modules, and runs the actions after they are imported."""

    def __init__(self) -> None:
        self.actions: dict[str, dict[Action, None]] = {}
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find an awaited module, and arrange for its actions to run after its code."""
        if not self.actions.get(name) or name in self._searching:
            return None
        self._searching.add(name)  # another finder that asks all finders may ask us again
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next(filter(None, found), None)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: object) -> None:
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in list(self.actions.get(module.__name__, ())):
                action(module)

        loader.exec_module = exec_module  # type: ignore[attr-defined]


_watcher = _Watcher()


def when_imported(name: str, action: Action) -> None:
    """Call `action` with module `name`: now if it is already imported, and after each later import of it."""
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    _watcher.actions.setdefault(name, {})[action] = None
    if name in sys.modules:
        action(importlib.import_module(name))  # waits if another thread is still importing it


def forget(name: str, action: Action) -> None:
    """Undo [`when_imported`] for later imports."""
    _watcher.actions.get(name, {}).pop(action, None)


def is_awaited(name: str, action: Action) -> bool:
    """Return whether [`when_imported`] is in force for a module and an action."""
    return _watcher in sys.meta_path and action in _watcher.actions.get(name, {})
