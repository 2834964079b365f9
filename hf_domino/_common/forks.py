"""What a forked process needs to go on: locks that no thread holds any more, and state that no thread was changing.

A fork copies the memory of the process, but only the thread that forks. A lock that another thread holds at that moment
would stay locked in the child for ever, and what it guards could be half changed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType


class Lock:
    """A reentrant lock that a forked process gets anew if another thread held it.

    It is reentrant because the garbage collector can end an abandoned call, generator or `with` block at any point,
    also while its thread holds the lock.

    Args:
        forget (`Callable`, *optional*): Called in such a child. It drops what the other thread may have left half
            changed, and is needed unless everything that the lock guards changes in single steps.
    """

    def __init__(self, forget: Callable[[], None] | None = None):
        self._lock = threading.RLock()
        self._forget = forget
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Replace the lock in a forked process, unless it is free or held by the thread that forked."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return
        self._lock = threading.RLock()
        if self._forget is not None:
            self._forget()


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def in_child(function: Callable[[], None]) -> None:
    """Call a function in every process that is forked from this one, where the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def _renew_locks() -> None:
    for lock in list(_locks):
        lock.renew()


in_child(_renew_locks)
