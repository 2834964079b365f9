"""The drafters that calls have named: each is kept beside the target of the calls, until `release_workspaces`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_domino._common.forks import Lock
from hf_domino.methods.modeling import DominoDraftModel


class _Named:
    """The drafter of one name and one target, once it is loaded."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.drafter: DominoDraftModel | None = None
        self.state: Hashable = None


_lock = Lock()
_named: WeakKeyDictionary[PreTrainedModel, dict[Hashable, _Named]] = WeakKeyDictionary()


def drafter_named(
    target: PreTrainedModel, name: Hashable, state: Hashable, load: Callable[[], DominoDraftModel]
) -> DominoDraftModel:
    """Return the drafter of a name, which is loaded once for a target, and again if its state is another one.

    Args:
        target (`PreTrainedModel`): The target.
        name (`Hashable`): Names the drafter.
        state (`Hashable`): What the loaded drafter depends on.
        load (`Callable`): Loads the drafter, which can take long. Meanwhile, only calls with the same name wait.
    """
    with _lock:
        named = _named.setdefault(target, {}).setdefault(name, _Named())
    with named.lock:  # threads that begin together load it once
        if named.drafter is None or named.state != state:
            named.drafter = None  # frees its memory before the next one is loaded
            named.drafter = load()
            named.state = state
        return named.drafter


def release_named() -> None:
    """Free all drafters that were named, except in calls that are running."""
    with _lock:
        _named.clear()
