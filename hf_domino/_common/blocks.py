"""`with` blocks that change something for a while, and undo it whoever ends them.

A generator or a task can hold a block open, and another thread or task can end it, or the garbage collector. A
`ContextVar` alone cannot be reset then: its value would stay set in the context where the block was opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

from hf_domino._common.forks import Lock, in_child

T = TypeVar("T")


class _Closed:
    """Takes the place of the value of a block that has ended."""


class _Block(Generic[T]):
    def __init__(self, value: T, outer: _Block[T] | None):
        self.value: T | type[_Closed] = value
        self.outer = outer


class Setting(Generic[T]):
    """A value that a `with` block sets for the calling thread or task, and for tasks that it starts, until it ends.

    Args:
        name (`str`): A name for debugging.
        default (`T`): The value outside of all blocks.
    """

    def __init__(self, name: str, default: T):
        self._innermost: ContextVar[_Block[T] | None] = ContextVar(name, default=None)
        self._default = default

    def get(self) -> T:
        """Return the value that the innermost block which is still open has set."""
        block = self._innermost.get()
        while block is not None:
            value = block.value  # read once, because another thread may end the block
            if value is not _Closed:
                return value  # type: ignore[return-value]
            block = block.outer
        return self._default

    @contextmanager
    def within(self, value: T) -> Iterator[None]:
        """Set the value inside a `with` block."""
        block = _Block(value, self._innermost.get())
        while block.outer is not None and block.outer.value is _Closed:
            block.outer = block.outer.outer
        self._innermost.set(block)
        try:
            yield
        finally:
            block.value = _Closed  # which ends it in every context that has it
            if self._innermost.get() is block:
                self._innermost.set(block.outer)


class Patch:
    """Keeps something of another package replaced while any `with` block is open, in any thread.

    Args:
        replace (`Callable`): Replaces it, unless other code has replaced it.
        restore (`Callable`): Restores it, unless other code has replaced it since.
    """

    def __init__(self, replace: Callable[[], None], restore: Callable[[], None]):
        self._replace = replace
        self._restore = restore
        self._lock = Lock()
        self._open: dict[object, int] = {}  # each open block, with the thread that opened it
        in_child(self._forget_other_threads)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Keep it replaced inside a `with` block."""
        block = object()
        with self._lock:
            self._open[block] = threading.get_ident()
            self._replace()
        try:
            yield
        finally:
            with self._lock:
                self._open.pop(block, None)  # a forked process may have forgotten it
                self._update()

    def _update(self) -> None:
        if self._open:
            self._replace()
        else:
            self._restore()

    def _forget_other_threads(self) -> None:
        """Forget the blocks of threads that a forked process does not have, because nobody would end them there."""
        own = threading.get_ident()
        self._open = {block: thread for block, thread in self._open.items() if thread == own}
        self._update()
