"""What `generate`, `chat` and `explain` share: they load a pair, stream each round, and compare with plain generation.

A streamed round appears in its own colour once the target has committed it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from hf_domino._common.verdict import load_per_core, speed, verdict, why_busy
from hf_domino.cli.flags import choice_of, load_models
from hf_domino.data.prompts import Asked
from hf_domino.evaluation.benchmark.prompts import inputs_of
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.evaluation.initial_state import InitialState
from hf_domino.pair import Pair, prompts_for
from hf_domino.stats.decoding_stats import DecodingStats

TYPICAL = 5  # index of a bundled prompt with about the median speed-up, whose text does not loop
COLOURS = ("cyan", "magenta")  # rounds alternate between them; both are readable on dark and on light backgrounds
PREFILL_STYLE = "dim"
COLOUR_LEGEND = "one colour a round, its last token underlined, the prefill's token dim"
PLAIN_LEGEND = "| ends a round"
SEVERAL = "one text decides little: hf-domino bench measures several"
BYTE = re.compile("<0x[0-9A-F]{2}>")  # how tokenizers that fall back to bytes write one
INCOMPLETE = "\ufffd"  # what the first bytes of a character are decoded to
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def open_pair(options: argparse.Namespace) -> tuple[Pair, dict[str, Any]]:
    """Load the models that a command line names, and read its arguments of `generate`; also set the seed."""
    arguments = choice_of(options)
    return load_models(options), arguments


def asked(pair: Pair, prompt: str | None) -> Asked:
    """Turn the user's text into a prompt; without a text, choose a prompt of the target's folder or a bundled one."""
    if prompt is not None:
        return pair.ask([{"role": "user", "content": prompt}])
    prompts, _ = prompts_for(pair)
    return prompts[TYPICAL % len(prompts)]


def text_of(prompt: Asked) -> str:
    """Return the text of a prompt, in which each message of a conversation follows its role."""
    return prompt.get("text") or "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt["messages"])


def shows_colour(console: Console) -> bool:
    """Return whether a console shows colours: it is a terminal, and NO_COLOR is not set."""
    return console.color_system is not None and not console.no_color


def round_of(position: int, lengths: Sequence[int]) -> tuple[int | None, bool]:
    """Find the round that committed a new token (None for the prefill), and whether the token ends that round.

    Example:
    ```python
    >>> from hf_domino.cli.answers import round_of
    >>> [round_of(position, [2, 3]) for position in range(4)]
    [(None, False), (0, False), (0, True), (1, False)]

    ```
    """
    ends = list(accumulate(lengths))
    if not position:
        return None, False
    return bisect_left(ends, position), position in ends


class TextPieces:
    """Decode tokens one by one into pieces, which together are the text that `decode` returns for all of them.

    A piece is held back while a later token can still change it: a part of a character, or a byte that stands for lack
    of a word, because bytes next to each other are decoded together.

    Args:
        tokenizer (`PreTrainedTokenizerFast`): A fast tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._backend = tokenizer.backend_tokenizer
        self._special = {token for token, added in self._backend.get_added_tokens_decoder().items() if added.special}
        self._tokens: list[int] = []  # without special ones
        # The first tokens up to here have been returned. A piece is what the tokens behind `_begin` add to those of
        # them that have been returned, so a long text is not decoded again for each token.
        self._done = 0
        self._begin = 0

    def add(self, token: int) -> str:
        """Return the text that is certain after this token and was not before; it can be empty."""
        if token in self._special:
            return ""
        self._tokens.append(token)
        is_byte = BYTE.fullmatch(self._backend.id_to_token(token) or "")
        if is_byte or self._backend.decode(self._tokens[self._begin :]).endswith(INCOMPLETE):
            return ""
        return self.rest()

    def rest(self) -> str:
        """Return the text that was held back."""
        before = self._backend.decode(self._tokens[self._begin : self._done])
        piece = self._backend.decode(self._tokens[self._begin :])[len(before) :]
        if piece:
            self._begin = self._done
            self._done = len(self._tokens)
        return piece


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
        self._pieces = TextPieces(tokenizer)
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
            self._print(self._pieces.add(token), *self._round())

    def end(self) -> None:
        """Print the text that was held back because a later token could have changed it, and end the line."""
        if rest := self._pieces.rest():
            self._print(rest, self._round()[0], is_last=False)  # the round's end is marked already
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


class Comparison(NamedTuple):
    """Two outputs for the same prompt: new token ids, seconds, tokens per round, and the target's dtype."""

    plain: torch.Tensor
    assisted: torch.Tensor
    plain_seconds: float
    assisted_seconds: float
    acceptance_lengths: list[int]
    dtype: torch.dtype

    @property
    def speed_up(self) -> float:
        """Tokens per second, divided by those of plain generation."""
        return len(self.assisted) / self.assisted_seconds / (len(self.plain) / self.plain_seconds)

    @property
    def is_exact(self) -> bool:
        """Whether the outputs must be equal, because the target computes in fp32."""
        return self.dtype == torch.float32

    @property
    def equal(self) -> bool:
        """Whether both outputs are equal, token for token."""
        return torch.equal(self.plain, self.assisted)


def compare(pair: Pair, prompt: Asked, arguments: dict[str, Any], seed: int, console: Console) -> Comparison:
    """Print the prompt, stream the plain and the assisted output, and then generate both again to time them.

    Every run gets the same `arguments` of `generate` and the same `seed`. Without colours, a `|` ends each round. A
    drafter that learns while it drafts begins each run, and is left, with what it knew before.
    """
    inputs = inputs_of(pair, [prompt])
    legend = COLOUR_LEGEND if shows_colour(console) else PLAIN_LEGEND
    # With this number, plain `generate` would use its own prompt lookup; here it is meant for the drafter.
    alone = arguments | {"prompt_lookup_num_tokens": None}
    arms = {"plain generate": alone, f"with the drafter: {legend}": arguments | {"assistant_model": pair.drafter}}
    initial = InitialState([pair.drafter])
    _print_under(console, f"prompt ({pair.name})", text_of(prompt))
    for is_timed in (False, True):
        runs = []
        for title, arm in arms.items():
            streamer = None
            if not is_timed:  # the streamed run also warms up
                _print_under(console, title)
                streamer = RoundPrinter(pair.tokenizer, console, shows_rounds="assistant_model" in arm)
            torch.manual_seed(seed)
            runs.append(generate_timed(pair.target, inputs, streamer=streamer, **arm))
            initial.restore()
        if not is_timed:
            print(f"measuring both again, {about(sum(seconds for _, seconds in runs))}", file=sys.stderr)
    (plain, plain_seconds), (assisted, assisted_seconds) = runs
    lengths = pair.drafter.stats.rows[0]
    return Comparison(plain[0], assisted[0], plain_seconds, assisted_seconds, lengths, pair.target.dtype)


def about(seconds: float) -> str:
    """Say how long something takes that took so many seconds before."""
    return f"about {math.ceil(seconds)} s"


def _print_under(console: Console, title: str, *text: str) -> None:
    console.print(Rule(title, align="left", style="dim"), *text, markup=False)


def show(console: Console, pair: Pair, comparison: Comparison) -> None:
    """Print the speeds, whether the outputs are equal, why drafting paused, and the verdict."""
    console.print(Rule(style="dim"))
    plain = len(comparison.plain) / comparison.plain_seconds
    rounds = len(comparison.acceptance_lengths)
    console.print(
        f"plain: {speed(plain)}, {len(comparison.plain)} forwards of the target; with the drafter: "
        f"{speed(plain * comparison.speed_up)}, {rounds + 1} forwards, the prompt's included"
    )
    outcome = "DIFFERENT"
    if comparison.equal:
        outcome = "identical, token for token"
    elif not comparison.is_exact:
        outcome += ", which rounding explains where two tokens score nearly alike; --dtype float32 leaves no doubt"
    tokens = len(comparison.assisted)
    computes = str(pair.target.device)
    if pair.target.device.type == "cpu":
        computes = f"threads: {torch.get_num_threads()}"
    console.print(f"{rounds} rounds; outputs: {outcome} ({tokens} tokens, {SHORT_NAMES[comparison.dtype]}, {computes})")
    busy = why_busy(load_per_core())
    if pauses := pair.drafter.stats.pauses:
        reason = busy or pauses[0].reason
        console.print(f"drafting paused for {pair.drafter.stats.num_paused} tokens: {reason}")
    way_out = SEVERAL
    if not comparison.is_exact:  # a CPU without bfloat16 units is slower in bfloat16
        way_out = f"try --dtype float32, and {way_out}"
    console.print(verdict(comparison.speed_up, "the drafter", "in this one text", way_out, busy, rounds + 1))
