"""Waiting for a module: before, behind and during its import, from several threads, with other hooks about."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
import threading

import pytest

from hf_domino.integration.on_import import forget, is_awaited, when_imported


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a module, which is forgotten when the test ends."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(name, code="value = 1"):
        (tmp_path / f"{name}.py").write_text(code)
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def seen():
    return []


@pytest.fixture
def note(seen):
    def note(module):
        seen.append(module.value)

    return note


def test_module_to_come(written, note, seen):
    name = written("awaited_later")
    when_imported(name, note)
    when_imported(name, note)
    assert name not in sys.modules
    assert is_awaited(name, note)
    assert importlib.util.find_spec(name) is not None  # to look is not to import
    assert seen == []
    module = importlib.import_module(name)
    assert seen == [1]
    importlib.reload(module)
    assert seen == [1, 1]
    forget(name, note)
    importlib.reload(module)
    assert seen == [1, 1]
    when_imported(name, note)  # one that is there
    assert seen == [1, 1, 1]
    forget(name, note)
    assert not is_awaited(name, note)


def test_module_that_another_thread_imports_at_the_moment(written, note, seen):
    name = written("awaited_meanwhile", "import threading, test_on_import_gate as gate\nvalue = gate.pass_()")
    gate = type(sys)("test_on_import_gate")
    entered, may_go_on = threading.Event(), threading.Event()
    gate.pass_ = lambda: (entered.set(), may_go_on.wait(10), 7)[2]
    sys.modules["test_on_import_gate"] = gate
    importing = threading.Thread(target=importlib.import_module, args=(name,))
    importing.start()
    assert entered.wait(10)
    waiting = threading.Thread(target=when_imported, args=(name, note))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert seen == []
    may_go_on.set()
    importing.join()
    waiting.join()
    del sys.modules["test_on_import_gate"]
    assert seen == [7]


def test_module_that_is_not_there_or_fails(written, note, seen):
    when_imported("awaited_in_vain", note)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited_in_vain")
    name = written("awaited_broken", "value = 1 / 0")
    when_imported(name, note)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(name)
    assert seen == []


def test_another_hook_of_this_kind(written, note, seen, monkeypatch):
    """One that asks all finders, ours included, as `wrapt` and tracing tools do."""

    class Hook(importlib.abc.MetaPathFinder):
        asked = False

        def find_spec(self, name, path, target=None):
            if self.asked:
                return None
            self.asked = True
            return importlib.util.find_spec(name)

    name = written("awaited_by_two")
    when_imported(name, note)
    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path, Hook()])
    importlib.import_module(name)
    assert set(seen) == {1}
