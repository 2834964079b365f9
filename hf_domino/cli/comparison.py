"""One prompt, generated plainly and with the drafter, and how both are shown; the outputs must be equal."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule

from hf_domino._common.verdict import WAY_OUT, verdict
from hf_domino.cli.picture import COLOUR_LEGEND, PLAIN_LEGEND, shows_colour
from hf_domino.cli.streaming import RoundPrinter
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.pair import Pair

Prompt = dict[str, Any]
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen.

    Args:
        temperature (`float`): To sample at; 0 takes the likeliest.
        seed (`int`): Of every run that samples.
        lookup_tokens (`int`, *optional*): Most that a round may copy from the text so far, with the drafter.
    """

    temperature: float = 0.0
    seed: int = 0
    lookup_tokens: int | None = None

    def arguments(self) -> dict[str, Any]:
        """As arguments of `generate`."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, seed {self.seed}" if self.temperature else "greedy"


@dataclass(frozen=True)
class Comparison:
    """The same prompt generated twice.

    Args:
        plain (`torch.Tensor`): New token ids of plain `generate`, `[num_new_tokens]`.
        assisted (`torch.Tensor`): New token ids with the drafter, `[num_new_tokens]`.
        plain_seconds (`float`): Median over the repeats.
        assisted_seconds (`float`): Median over the repeats.
        acceptance_lengths (`list[int]`): Tokens each round brought.
        choice ([`Choice`]): How tokens were chosen.
    """

    plain: torch.Tensor
    assisted: torch.Tensor
    plain_seconds: float
    assisted_seconds: float
    acceptance_lengths: list[int]
    choice: Choice

    @property
    def speed_up(self) -> float:
        """Tokens a second over plain generation's."""
        return len(self.assisted) / self.assisted_seconds / (len(self.plain) / self.plain_seconds)

    @property
    def equal(self) -> bool:
        """Whether both outputs are the same, token for token."""
        return torch.equal(self.plain, self.assisted)

    def to_dict(self, pair: Pair, prompt: Prompt) -> dict[str, Any]:
        """The comparison for JSON.

        Args:
            pair (`Pair`): The pair that generated.
            prompt (`dict`): The prompt, as for [`compare`].
        """
        texts = {"plain": self.plain, "assisted": self.assisted}
        return {
            "target": pair.name,
            "prompt": prompt.get("text", prompt.get("messages")),
            "equal": self.equal,
            **{name: pair.tokenizer.decode(tokens, skip_special_tokens=True) for name, tokens in texts.items()},
            "num_new_tokens": len(self.assisted),
            "plain_seconds": self.plain_seconds,
            "assisted_seconds": self.assisted_seconds,
            "acceptance_lengths": self.acceptance_lengths,
            "choice": dataclasses.asdict(self.choice),
        }


def compare(
    pair: Pair, prompt: Prompt, max_new_tokens: int, repeats: int, choice: Choice, console: Console
) -> Comparison:
    """Print the prompt, generate plain and assisted as one reads along, then both in turn again, timed.

    Args:
        pair (`Pair`): Target, tokenizer and drafter.
        prompt (`dict`): `text` to continue, or `messages` to answer.
        max_new_tokens (`int`): Tokens to generate.
        repeats (`int`): Timed runs of each.
        choice ([`Choice`]): How to choose tokens.
        console (`Console`): Where to print; without colours rounds are marked with `|`.
    """
    inputs = encode(pair.tokenizer, [prompt]).to(pair.target.device)
    arguments = choice.arguments() | {"max_new_tokens": max_new_tokens}
    legend = COLOUR_LEGEND if shows_colour(console) else PLAIN_LEGEND
    drafted = {"assistant_model": pair.drafter, "prompt_lookup_num_tokens": choice.lookup_tokens}
    ways = {"plain generate": {}, f"with the drafter: {legend}": drafted}
    _print_under(console, f"prompt ({pair.name})", _text_of(prompt))
    seconds, outputs = [], []
    for repeat in range(repeats + 1):
        for title, way in ways.items():
            streamer = None
            if not repeat:  # as it is written, which also warms up
                _print_under(console, title)
                streamer = RoundPrinter(pair.tokenizer, console, shows_rounds=bool(way))
            torch.manual_seed(choice.seed)
            output, elapsed = generate_timed(pair.target, inputs, streamer=streamer, **arguments, **way)
            outputs.append(output[0])
            seconds.append(elapsed)
    return Comparison(
        plain=outputs[-2],
        assisted=outputs[-1],
        plain_seconds=statistics.median(seconds[2::2]),
        assisted_seconds=statistics.median(seconds[3::2]),
        acceptance_lengths=pair.drafter.stats.rows[0],
        choice=choice,
    )


def _print_under(console: Console, title: str, *text: str) -> None:
    console.print(Rule(title, align="left", style="dim"), *text, markup=False)


def show(console: Console, pair: Pair, comparison: Comparison) -> None:
    """Print the figures, whether outputs are equal, why drafting paused, and what came of it.

    Args:
        console (`Console`): Where to print.
        pair (`Pair`): The pair that generated.
        comparison (`Comparison`): What was generated.
    """
    console.print(Rule(style="dim"))
    plain, forwards = len(comparison.plain) / comparison.plain_seconds, len(comparison.acceptance_lengths) + 1
    console.print(
        f"plain: {plain:.0f} tokens/s, {len(comparison.plain)} forwards of the target; with the drafter: "
        f"{plain * comparison.speed_up:.0f} tokens/s, {forwards} forwards"
    )
    outcome = "equal, token for token" if comparison.equal else "DIFFERENT"
    device = pair.target.device
    computes = f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    where = f"{SHORT_NAMES[pair.target.dtype]}, {computes}"
    console.print(f"outputs: {outcome} ({len(comparison.assisted)} tokens, {comparison.choice}, {where})")
    if pauses := pair.drafter.stats.pauses:
        console.print(f"drafting paused for {pair.drafter.stats.num_paused} tokens: {pauses[0].reason}")
    # A CPU without units for bfloat16 takes longer in it.
    dtype = "" if pair.target.dtype == torch.float32 else "try --dtype float32, "
    console.print(verdict(comparison.speed_up, "the drafter", way_out=dtype + WAY_OUT))


def _text_of(prompt: Prompt) -> str:
    """A prompt to be read; of a chat, who says what."""
    if "text" in prompt:
        return prompt["text"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt["messages"])
