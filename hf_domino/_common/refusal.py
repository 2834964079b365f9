"""The form of every error about a wrong value."""

from __future__ import annotations


def refusal(field: str, expected: object, value: object, remedy: str) -> ValueError:
    """The one form of such errors: which field, what it must be, what it is, and the way out."""
    return ValueError(f"{field} must be {expected}, got {value!r}. {remedy}")
