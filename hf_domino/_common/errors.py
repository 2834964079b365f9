"""Create all errors about wrong values in the same form, and tell errors of this package from those of libraries."""

from __future__ import annotations

import dis
from collections.abc import Collection

OWN = ("hf_domino", "domino_kernels")


def invalid_argument(field: str, expected: object, value: object, remedy: str) -> ValueError:
    """Create an error that names the field, the expected value, the actual value and the remedy."""
    error = ValueError(f"{field} must be {expected}, got {value!r}. {remedy}")
    error.invalid_field = field  # type: ignore[attr-defined]
    return error


def invalid_field(error: ValueError) -> str | None:
    """Return the field that an error of [`invalid_argument`] names; None for any other error."""
    return getattr(error, "invalid_field", None)


def is_own(error: BaseException, packages: Collection[str] = OWN) -> bool:
    """Return whether an error is a sentence for the user: made by [`invalid_argument`], or raised by these packages.

    An error of a library that passes through is not, nor is one that an operation raises in the package's own code,
    such as `int("x")`: its message does not say what the user can do.
    """
    if hasattr(error, "invalid_field"):
        return True
    last = error.__traceback__
    if last is None or not isinstance(error, (ValueError, OSError, ImportError)):
        return False
    while last.tb_next is not None:
        last = last.tb_next
    name = str(last.tb_frame.f_globals.get("__name__"))
    if name.partition(".")[0] not in packages:
        return False
    raising = (step.opname for step in dis.get_instructions(last.tb_frame.f_code) if step.offset == last.tb_lasti)
    return next(raising, "").startswith("RAISE")


def mark_restartable(error: Exception) -> None:
    """Say that a call failed before it had any effect beyond its own cache, so that it can start again."""
    error.may_restart = True  # type: ignore[attr-defined]


def may_restart(error: Exception) -> bool:
    """Return whether the call that raised this error can start again."""
    return getattr(error, "may_restart", False)
