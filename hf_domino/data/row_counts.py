"""`RowCounts`: how many examples were read, how many were left out, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

# Field of the counts -> the reason why such examples are left out.
REASONS = {
    "without_anchor": "without two neighbouring supervised tokens (raise max_length if they were cut, or check where "
    "the loss falls)",
    "unaligned": "assistant turns that do not begin as the chat template asks for them, as with thinking where it is "
    "off (set --chat-template-kwargs to the mode of the text)",
}


@dataclass
class RowCounts:
    """Counts the records that were read, and the examples that were kept or left out.

    Args:
        records (`int`, *optional*, defaults to 0): Records that were read.
        rows (`int`, *optional*, defaults to 0): Examples that were kept.
        tokens (`int`, *optional*, defaults to 0): Tokens of the kept examples.
        cut (`int`, *optional*, defaults to 0): Kept examples that were cut at the maximum length.
        copies (`int`, *optional*, defaults to 0): Kept examples that are equal to an earlier one.
        without_anchor (`int`, *optional*, defaults to 0): Examples left out because no two neighbouring tokens are
            supervised.
        unaligned (`int`, *optional*, defaults to 0): Examples left out because their assistant turn does not begin with
            the generation prompt of the chat template.
        first_left_out (`str`, *optional*): The place of the first example that was left out.
    """

    records: int = 0
    rows: int = 0
    tokens: int = 0
    cut: int = 0
    copies: int = 0
    without_anchor: int = 0
    unaligned: int = 0
    first_left_out: str | None = None

    @classmethod
    def sum(cls, parts: Iterable[RowCounts]) -> RowCounts:
        """Add the counts of consecutive stretches of records."""
        total = cls()
        for part in parts:
            for field in fields(cls):
                if field.name != "first_left_out":
                    setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
            total.first_left_out = total.first_left_out or part.first_left_out
        return total

    @property
    def left_out(self) -> int:
        """Number of examples that were left out, for whatever reason."""
        return sum(getattr(self, name) for name in REASONS)

    def describe(self) -> str:
        """Describe how many examples were left out or cut, and why; empty if there are none.

        Example:
        ```python
        >>> from hf_domino.data import RowCounts
        >>> RowCounts(records=5, rows=5, cut=1).describe()
        '1 of 5 rows are cut at max_length.'

        ```
        """
        said = []
        if self.left_out:
            reasons = [f"{getattr(self, name)} {why}" for name, why in REASONS.items() if getattr(self, name)]
            first = ""
            if self.first_left_out:
                first = f", the first is {self.first_left_out}"
            total = self.left_out + self.rows
            said.append(f"{self.left_out} of {total} rows are left out{first}: {'; '.join(reasons)}.")
        if self.cut:
            said.append(f"{self.cut} of {self.rows} rows are cut at max_length.")
        if self.copies:
            said.append(f"{self.copies} of {self.rows} rows are equal to an earlier one.")
        return " ".join(said)
