"""A picture of assisted decoding for the terminal: which tokens came from which round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

COLOURS = ("cyan", "magenta")  # rounds alternate; both are readable on dark and on light backgrounds
PREFILL_STYLE = "dim"
COLOUR_LEGEND = "one colour a round, its last token underlined, the prefill's token dim"
PLAIN_LEGEND = "| ends a round"


@dataclass(frozen=True)
class Origin:
    """Where a token came from.

    Args:
        round (`int`, *optional*): Number of the round, from 0; None for the token of the prefill.
        is_last (`bool`): Whether the round ends with it: the target's own token, unless the text ends there.
    """

    round: int | None
    is_last: bool


def origins(num_tokens: int, acceptance_lengths: Sequence[int]) -> list[Origin]:
    """Say of every new token which round committed it.

    Args:
        num_tokens (`int`): New tokens so far, at most one for the prefill plus the sum of `acceptance_lengths`.
        acceptance_lengths (`Sequence[int]`): Tokens each round brought, bonus included.

    Example:
    ```python
    >>> from hf_domino.cli.picture import origins
    >>> [(origin.round, origin.is_last) for origin in origins(4, [2, 3])]
    [(None, False), (0, False), (0, True), (1, False)]

    ```
    """
    found = [Origin(None, False)]
    for number, length in enumerate(acceptance_lengths):
        found += [Origin(number, position == length - 1) for position in range(length)]
    if num_tokens > len(found):
        raise ValueError(f"num_tokens must be at most {len(found)} for these acceptance_lengths, got {num_tokens}.")
    return found[:num_tokens]


def picture(texts: Sequence[str], token_origins: Sequence[Origin], colour: bool) -> Text:
    """Draw the generated text by rounds, in colour, or with `|` after each round.

    Args:
        texts (`Sequence[str]`): Text of each token.
        token_origins (`Sequence[Origin]`): Origin of each token.
        colour (`bool`): Whether the terminal shows colours.
    """
    drawn = Text()
    for text, origin in zip(texts, token_origins, strict=True):
        drawn.append(text, style=_style(origin) if colour else "")
        if origin.is_last and not colour:
            drawn.append("|")
    return drawn


def _style(origin: Origin) -> str:
    if origin.round is None:
        return PREFILL_STYLE
    return COLOURS[origin.round % len(COLOURS)] + (" underline" if origin.is_last else "")


def shows_colour(console: Console) -> bool:
    """Whether a console shows colours: a terminal, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color
