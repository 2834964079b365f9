"""The default drafter of a model: `generate` drafts with it unless a call says otherwise, whoever makes the call.

A table with weak keys maps each model to its drafter. Nothing is stored on the model itself, so the drafter is not
saved, copied or compiled with it. The patch looks up the table when a call without an assistant reaches its decoding
method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_domino._common.blocks import Setting
from hf_domino._common.forks import Lock

if TYPE_CHECKING:
    from hf_domino.methods import DominoDraftModel

_attached: WeakKeyDictionary[Any, Attached | None] = WeakKeyDictionary()  # None: it must have no drafter
_on_first_call: list[Callable[[Any], None]] = []  # at most one function, which attaches a drafter to its target
_is_plain = Setting("plain", default=False)
# Locks for the counts, and for a model's first call.
_lock = Lock()
_first_call_lock = Lock()


@dataclass
class Attached:
    """The default drafter of a model, with counts of the model's `generate` calls.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        num_drafted (`int`): Number of calls that drafted with it.
        num_plain (`dict[str, int]`): Number of calls that could not be drafted and ran without it, by reason.
        on_call (`Callable`, *optional*): Function to call after each call that drafted, with its sequences
            `[B, T + new]`, the prompts' attention mask `[B, T]` (None if there was no padding) and its
            [`DecodingStats`].
    """

    drafter: DominoDraftModel
    num_drafted: int = 0
    num_plain: dict[str, int] = field(default_factory=dict)
    on_call: Callable[..., None] | None = None

    def count(self, reason: str | None = None, message: str = "") -> None:
        """Count a call as drafted, or as plain for a reason; its message is logged the first time."""
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
    """Make `drafter` the default drafter of `target`; the caller has checked that it fits."""
    _attached[target] = Attached(drafter)


def replace_default(target: Any, default: Attached, other: Attached | None) -> None:
    """Give a target another default drafter, or none, if `default` is still its own."""
    from hf_domino.targets.compatibility import unwrapped

    target = unwrapped(target)
    if _attached.get(target) is default:
        _attached[target] = other


def await_target(meet: Callable[[Any], None]) -> None:
    """Pass each model to `meet` at its first call, unless a drafter was attached to it or detached from it before."""
    _on_first_call[:] = [meet]


def detach(target: Any) -> None:
    """Remove the default drafter of `target`. A call that is already running keeps it; a second call changes nothing.

    Args:
        target (`PreTrainedModel`): The model that was passed to [`attach`].
    """
    from hf_domino.targets.compatibility import unwrapped

    _attached[unwrapped(target)] = None


def attached(target: Any) -> Attached | None:
    """Return the default drafter of `target` with counts of its calls, or None if it has none.

    Args:
        target (`PreTrainedModel`): The model that was passed to [`attach`].
    """
    from hf_domino.targets.compatibility import unwrapped

    return _attached.get(unwrapped(target))


@contextmanager
def plain() -> Iterator[None]:
    """Generate without default drafters inside a `with` block; this affects only the calling thread or task."""
    with _is_plain.within(True):
        yield


def default_of(target: Any) -> Attached | None:
    """Return the default drafter for a call of `target`; None if there is none, or inside [`plain`]."""
    if _is_plain.get():
        return None
    if _on_first_call and target not in _attached:
        with _first_call_lock:
            if target not in _attached:
                _on_first_call[0](target)
    return _attached.get(target)
