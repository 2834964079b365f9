"""`RowCounts`: what became of the records that were read."""

from __future__ import annotations

from dataclasses import dataclass

# Field -> why such rows are left out.
REASONS = {
    "without_anchor": "without two neighbouring supervised tokens (raise max_length if they were cut, or check where "
    "the loss falls)",
    "untold": "assistant turns that do not begin as the chat template asks for them, as with thinking where it is off "
    "(set --chat-template-kwargs to the mode of the text)",
    "too_long": "prompts that fill max_length",
    "duplicates": "equal to an earlier row",
    "contaminated": "with text of the evaluation",
}


@dataclass(frozen=True)
class RowCounts:
    """What became of the records that were read.

    Args:
        records (`int`, *optional*, defaults to 0): Records, or pieces of plain text, that were read.
        rows (`int`, *optional*, defaults to 0): Rows that are left.
        tokens (`int`, *optional*, defaults to 0): Their tokens.
        cut (`int`, *optional*, defaults to 0): Those among them that were cut at the longest length.
        without_anchor (`int`, *optional*, defaults to 0): Left out: no two neighbouring supervised tokens.
        untold (`int`, *optional*, defaults to 0): Left out: assistant turns that begin otherwise than asked for.
        too_long (`int`, *optional*, defaults to 0): Left out: prompts that leave no room for an answer.
        duplicates (`int`, *optional*, defaults to 0): Left out: equal to an earlier row.
        contaminated (`int`, *optional*, defaults to 0): Left out: with text of the evaluation, see [`LeakCheck`].
        first_left_out (`str`, *optional*): Where the first row stands that was left out.
        copies (`int`, *optional*, defaults to 0): Those among the rows that are equal to an earlier one.
    """

    records: int = 0
    rows: int = 0
    tokens: int = 0
    cut: int = 0
    without_anchor: int = 0
    untold: int = 0
    too_long: int = 0
    duplicates: int = 0
    contaminated: int = 0
    first_left_out: str | None = None
    copies: int = 0

    @property
    def left_out(self) -> int:
        """Rows that were left out, for whatever reason."""
        return sum(getattr(self, name) for name in REASONS)

    def describe(self) -> str:
        """What was left out and cut, and why; empty if nothing was.

        Example:
        ```python
        >>> from hf_domino.data.counts import RowCounts
        >>> RowCounts(records=5, rows=4, duplicates=1, first_left_out="a.jsonl, line 3").describe()
        '1 of 5 rows are left out, the first is a.jsonl, line 3: 1 equal to an earlier row.'

        ```
        """
        said = []
        if self.left_out:
            reasons = [f"{count} {why}" for name, why in REASONS.items() if (count := getattr(self, name))]
            first = f", the first is {self.first_left_out}" if self.first_left_out else ""
            total = self.left_out + self.rows
            said.append(f"{self.left_out} of {total} rows are left out{first}: {'; '.join(reasons)}.")
        if self.cut:
            said.append(f"{self.cut} of {self.rows} rows are cut at max_length.")
        if self.copies:
            said.append(f"{self.copies} of {self.rows} rows are equal to an earlier one; drop_duplicates omits them.")
        return " ".join(said)
