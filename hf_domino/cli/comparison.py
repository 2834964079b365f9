"""One prompt, generated plainly and with the drafter, and how both are shown; the outputs must be equal."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from hf_domino.cli.picture import COLOUR_LEGEND, PLAIN_LEGEND, origins, picture, shows_colour, token_texts
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
    """

    temperature: float = 0.0
    seed: int = 0

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


def compare(pair: Pair, prompt: Prompt, max_new_tokens: int, repeats: int, choice: Choice) -> Comparison:
    """Generate plain and assisted in turn, after one run of each that is not timed.

    Args:
        pair (`Pair`): Target, tokenizer and drafter.
        prompt (`dict`): `text` to continue, or `messages` to answer.
        max_new_tokens (`int`): Tokens to generate.
        repeats (`int`): Timed runs of each.
        choice ([`Choice`]): How to choose tokens.
    """
    inputs = encode(pair.tokenizer, [prompt]).to(pair.target.device)
    arguments = choice.arguments() | {"max_new_tokens": max_new_tokens}
    plain_seconds, assisted_seconds = [], []
    for _ in range(repeats + 1):
        torch.manual_seed(choice.seed)
        plain, elapsed = generate_timed(pair.target, inputs, **arguments)
        plain_seconds.append(elapsed)
        torch.manual_seed(choice.seed)
        assisted, elapsed = generate_timed(pair.target, inputs, assistant_model=pair.drafter, **arguments)
        assisted_seconds.append(elapsed)
    return Comparison(
        plain=plain[0],
        assisted=assisted[0],
        plain_seconds=statistics.median(plain_seconds[1:]),
        assisted_seconds=statistics.median(assisted_seconds[1:]),
        acceptance_lengths=pair.drafter.stats.rows[0],
        choice=choice,
    )


def show(console: Console, pair: Pair, prompt: Prompt, comparison: Comparison) -> None:
    """Print prompt, both outputs, the picture of rounds and the figures.

    Args:
        console (`Console`): Where to print; without colours rounds are marked with `|`.
        pair (`Pair`): The pair that generated.
        prompt (`dict`): The prompt, as for [`compare`].
        comparison (`Comparison`): What was generated.
    """
    colour = shows_colour(console)
    assisted = comparison.assisted.tolist()
    token_origins = origins(len(assisted), comparison.acceptance_lengths)
    sections = {
        f"prompt ({pair.name})": _text_of(prompt),
        "plain generate": pair.tokenizer.decode(comparison.plain, skip_special_tokens=True),
        f"with the drafter: {COLOUR_LEGEND if colour else PLAIN_LEGEND}": picture(
            token_texts(pair.tokenizer, assisted), token_origins, colour
        ),
    }
    for title, text in sections.items():
        console.print(Rule(title, align="left", style="dim"))
        console.print(text, markup=False)
    console.print(Rule(style="dim"))
    console.print(_figures(comparison))
    verdict = "equal, token for token" if comparison.equal else "DIFFERENT"
    device = pair.target.device
    computes = f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    where = f"{SHORT_NAMES[pair.target.dtype]}, {computes}"
    console.print(f"outputs: {verdict} ({len(assisted)} tokens, {comparison.choice}, {where})")


def _text_of(prompt: Prompt) -> str:
    """A prompt to be read; of a chat, who says what."""
    if "text" in prompt:
        return prompt["text"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt["messages"])


def _figures(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("", "tokens/s", "speed-up", "target forwards", "tokens per forward"):
        table.add_column(head, justify="right" if head else "left")
    plain = len(comparison.plain) / comparison.plain_seconds
    assisted = len(comparison.assisted) / comparison.assisted_seconds
    lengths = comparison.acceptance_lengths
    mean_length = f"{statistics.fmean(lengths):.2f}" if lengths else "no round"
    table.add_row("plain", f"{plain:.0f}", "1.00 x", str(len(comparison.plain)), "1.00")
    table.add_row("assisted", f"{assisted:.0f}", f"{assisted / plain:.2f} x", str(len(lengths) + 1), mean_length)
    return table
