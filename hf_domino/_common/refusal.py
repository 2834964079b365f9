"""The form of every error about a wrong value."""

from __future__ import annotations


def refusal(field: str, expected: object, value: object, remedy: str) -> ValueError:
    """Make an error that names the field, what it must be, what it is, and the way out."""
    error = ValueError(f"{field} must be {expected}, got {value!r}. {remedy}")
    error.refused = field  # type: ignore[attr-defined]
    return error


def refused_field(error: ValueError) -> str | None:
    """Return the field that a [`refusal`] is about; None for another error."""
    return getattr(error, "refused", None)
