"""Text as it is written: each round appears when the target has committed it, in a colour of its own."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers.generation.streamers import BaseStreamer

from hf_domino.cli.picture import Origin, origins, picture, shows_colour
from hf_domino.drafter.stats import DecodingStats


class RoundPrinter(BaseStreamer):
    """A streamer that prints the tokens of one sequence.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): The target's.
        console (`Console`): Where to print.
        shows_rounds (`bool`): Whether to tell rounds apart, by colours or, where there are none, by `|`.

    Raises:
        ValueError: If the tokenizer is not a fast one.
    """

    stats: DecodingStats | None = None  # `generate` puts those of its call here before the first token

    def __init__(self, tokenizer: Any, console: Console, shows_rounds: bool):
        if not tokenizer.is_fast:
            raise ValueError(
                f"the target's tokenizer must be a fast one, got {type(tokenizer).__name__}: "
                "call model.generate from Python instead."
            )
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        self._pieces = DecodeStream(skip_special_tokens=True)
        self._console, self._shows_rounds = console, shows_rounds
        self._prompt_came = False
        self.tokens: list[int] = []
        self.text = ""

    def put(self, value: torch.Tensor) -> None:
        """Print new tokens; the first call brings the prompt, which is left out.

        Args:
            value (`torch.Tensor`): Token ids, `[1, T]` for the prompt and `[1]` afterwards.
        """
        if not self._prompt_came:
            self._prompt_came = True
            return
        for token in value.flatten().tolist():
            self.tokens.append(token)
            self._print(self._pieces.step(self._tokenizer, token) or "", self._origin())

    def end(self) -> None:
        """Print what was held back as half a character, and end the line."""
        whole = self._tokenizer.decode(self.tokens, skip_special_tokens=True)
        if whole.startswith(self.text) and whole != self.text:
            self._print(whole[len(self.text) :], Origin(self._origin().round, is_last=False))  # marked already
        self._console.print()

    def _origin(self) -> Origin:
        lengths = self.stats.rows[0] if self.stats is not None else []
        # A round that is judged token by token is counted once it is over.
        known = [*lengths, max(len(self.tokens) - 1 - sum(lengths), 0) + 1]
        return origins(len(self.tokens), known)[-1]

    def _print(self, piece: str, origin: Origin) -> None:
        self.text += piece
        if self._shows_rounds:
            self._console.print(picture([piece], [origin], shows_colour(self._console)), end="", soft_wrap=True)
        elif not self._console.quiet:  # as it is: Rich leaves out form feeds and carriage returns
            print(piece, end="", file=self._console.file, flush=True)
