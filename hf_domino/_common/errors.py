"""Make every error about a wrong value in the same form."""

from __future__ import annotations


def invalid_argument(field: str, expected: object, value: object, remedy: str) -> ValueError:
    """Make an error that names the field, the expected value, the actual value, and the way out."""
    error = ValueError(f"{field} must be {expected}, got {value!r}. {remedy}")
    error.invalid_field = field  # type: ignore[attr-defined]
    return error


def invalid_field(error: ValueError) -> str | None:
    """Return the field that a [`invalid_argument`] names, or None for another error."""
    return getattr(error, "invalid_field", None)
