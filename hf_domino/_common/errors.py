"""Create all errors about wrong values in the same form."""

from __future__ import annotations


def invalid_argument(field: str, expected: object, value: object, remedy: str) -> ValueError:
    """Create an error that names the field, the expected value, the actual value and the remedy."""
    error = ValueError(f"{field} must be {expected}, got {value!r}. {remedy}")
    error.invalid_field = field  # type: ignore[attr-defined]
    return error


def invalid_field(error: ValueError) -> str | None:
    """Return the field that an error of [`invalid_argument`] names; None for any other error."""
    return getattr(error, "invalid_field", None)
