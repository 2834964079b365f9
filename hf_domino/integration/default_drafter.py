"""The default drafter of a model: every plain `generate` of that model drafts with it, whoever writes the call.

A table beside the models says which drafter is whose, and forgets a model with it. Nothing stands on the model, so
nothing is saved, copied or compiled with it. The patch asks the table where a plain call arrives prepared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from hf_domino.methods import DominoDraftModel

_attached: WeakKeyDictionary[Any, Attached | None] = WeakKeyDictionary()  # None: it is to have none
_meetings: list[Callable[[Any], None]] = []  # what attaches the drafter that waits for its target
_is_plain: ContextVar[bool] = ContextVar("plain", default=False)
# Of the counts, and of a model's first call.
_lock = threading.Lock()
_meeting = threading.Lock()


@dataclass
class Attached:
    """The default drafter of a model, and how the model's calls of `generate` went.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        num_drafted (`int`): Calls that drafted with it.
        num_plain (`dict[str, int]`): Calls that could not be drafted and were plain, by what stood against it.
        on_call (`Callable`, *optional*): Called after each call that drafted, with its sequences `[B, T + new]`, the
            prompts' attention mask `[B, T]`, None where there was no padding, and its [`DecodingStats`].
    """

    drafter: DominoDraftModel
    num_drafted: int = 0
    num_plain: dict[str, int] = field(default_factory=dict)
    on_call: Callable[..., None] | None = None

    def count(self, reason: str | None = None, message: str = "") -> None:
        """Count a call: drafted, or plain for a reason, whose message is logged the first time."""
        from hf_domino._common.notices import notice

        with _lock:
            if reason is None:
                self.num_drafted += 1
                return
            before = self.num_plain.get(reason, 0)
            self.num_plain[reason] = before + 1
        if not before:
            notice(f"generate goes on without the default drafter: {message}")


def set_default(target: Any, drafter: DominoDraftModel) -> None:
    """Let plain calls of `target` draft with `drafter`, which fits, from now on."""
    _attached[target] = Attached(drafter)


def await_target(meet: Callable[[Any], None]) -> None:
    """Let each model without a word about its drafter be met at its first call; see [`meet`]."""
    _meetings[:] = [meet]


def detach(target: Any) -> None:
    """Undo [`attach`] on `target`; a call that is running ends as it began. Calling it again changes nothing."""
    from hf_domino.target.compatibility import unwrapped

    _attached[unwrapped(target)] = None


def attached(target: Any) -> Attached | None:
    """The default drafter of `target` and how its calls went, or None if it has none."""
    from hf_domino.target.compatibility import unwrapped

    return _attached.get(unwrapped(target))


@contextmanager
def plain() -> Iterator[None]:
    """Generate without default drafters in a `with` block, in the calling thread or task."""
    token = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(token)


def default_of(target: Any) -> Attached | None:
    """The default drafter that a call of `target` drafts with, if nothing was said against it."""
    if _is_plain.get():
        return None
    if _meetings and target not in _attached:
        with _meeting:
            if target not in _attached:
                _meetings[0](target)
    return _attached.get(target)
