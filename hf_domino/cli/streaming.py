"""Print text while it is generated: each round appears in its own colour once the target has committed it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers.generation.streamers import BaseStreamer

from hf_domino.stats.decoding_stats import DecodingStats

COLOURS = ("cyan", "magenta")  # rounds alternate between them; both are readable on dark and on light backgrounds
PREFILL_STYLE = "dim"
COLOUR_LEGEND = "one colour a round, its last token underlined, the prefill's token dim"
PLAIN_LEGEND = "| ends a round"


def shows_colour(console: Console) -> bool:
    """Return whether a console shows colours: it is a terminal, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def round_of(position: int, lengths: Sequence[int]) -> tuple[int | None, bool]:
    """Find the round that committed a new token (None for the prefill), and whether the token ends that round.

    Example:
    ```python
    >>> from hf_domino.cli.streaming import round_of
    >>> [round_of(position, [2, 3]) for position in range(4)]
    [(None, False), (0, False), (0, True), (1, False)]

    ```
    """
    ends = list(accumulate(lengths))
    if not position:
        return None, False
    return bisect_left(ends, position), position in ends


class RoundPrinter(BaseStreamer):
    """Stream the tokens of one sequence to a console.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The target's tokenizer.
        console (`Console`): The console to print to.
        shows_rounds (`bool`): Whether to mark rounds by colours, or by `|` if the console has none.

    Raises:
        ValueError: If the tokenizer is not a fast one.
    """

    stats: DecodingStats | None = None  # `generate` puts the statistics of its call here before the first token

    def __init__(self, tokenizer: Any, console: Console, shows_rounds: bool):
        if not tokenizer.is_fast:
            raise ValueError(
                f"the target's tokenizer must be a fast one, got {type(tokenizer).__name__}: "
                "call model.generate from Python instead."
            )
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._pieces = DecodeStream(skip_special_tokens=True)
        self._console = console
        self._shows_rounds = shows_rounds
        self._prompt_came = False
        self.tokens: list[int] = []
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """Print new tokens. The first call passes the prompt, which is not printed.

        Args:
            value (`torch.Tensor`): Token ids, `[1, T]` for the prompt and `[1]` afterwards.
        """
        if not self._prompt_came:
            self._prompt_came = True
            return
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self._print(self._pieces.step(self._tokenizer, token) or "", *self._round())

    def end(self) -> None:
        """Print a character that was held back because it was incomplete, and end the line."""
        whole = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.startswith(self.text) and whole != self.text:
            self._print(whole[len(self.text) :], self._round()[0], is_last=False)  # the round's end is marked already
        self._console.print()

    def _round(self) -> tuple[int | None, bool]:
        lengths = self.stats.rows[0] if self.stats is not None else []
        return round_of(len(self.tokens) - 1, lengths)

    def _print(self, piece: str, number: int | None, is_last: bool) -> None:
        self.text += piece
        if not self._shows_rounds:
            print(piece, end="", file=self._console.file, flush=True)  # Rich leaves out form feeds and carriage returns
            return
        drawn = Text(piece + "|" * is_last)
        if shows_colour(self._console):
            style = PREFILL_STYLE
            if number is not None:
                style = COLOURS[number % len(COLOURS)]
            if is_last:
                style += " underline"
            drawn = Text(piece, style=style)
        self._console.print(drawn, end="", soft_wrap=True)
