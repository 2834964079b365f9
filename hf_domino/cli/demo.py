"""`hf-domino demo`: one prompt, generated plainly and with the drafter; the outputs must be equal."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from hf_domino.benchmark import generate_timed
from hf_domino.cli.bench_flags import add_pair_arguments, positive_int, set_up
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.picture import COLOUR_LEGEND, PLAIN_LEGEND, origins, picture, shows_colour, token_texts
from hf_domino.pair import PROMPTS, Pair, find_pair, load_pair, read_prompts

TYPICAL = 5  # prompt of the bundled pair whose speed-up is about the median of all, and whose text does not loop


@dataclass(frozen=True)
class Comparison:
    """The same prompt generated twice.

    Args:
        plain (`torch.Tensor`): New token ids of plain `generate`, `[num_new_tokens]`.
        assisted (`torch.Tensor`): New token ids with the drafter, `[num_new_tokens]`.
        plain_seconds (`float`): Median over the repeats.
        assisted_seconds (`float`): Median over the repeats.
        acceptance_lengths (`list[int]`): Tokens each round committed.
    """

    plain: torch.Tensor
    assisted: torch.Tensor
    plain_seconds: float
    assisted_seconds: float
    acceptance_lengths: list[int]

    @property
    def equal(self) -> bool:
        """Whether both outputs are the same, token for token."""
        return torch.equal(self.plain, self.assisted)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino demo`."""
    add_pair_arguments(parser)
    parser.add_argument("--prompt", help="text to continue (default: a held-out prompt of the pair)")
    parser.add_argument("--index", type=int, help="which held-out prompt of the pair, from 0 (default: a typical one)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="tokens to generate")
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed runs of each; the median counts")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino demo`; returns 1 if the outputs differ."""
    set_up(options)
    pair = load_pair(find_pair(options.pair))
    if options.prompt == "":
        raise ValueError("--prompt must be a text, got an empty one.")
    prompt = options.prompt or _held_out_prompt(pair, options.index)
    comparison = compare(pair, prompt, options.max_new_tokens, options.repeats)
    show(Console(highlight=False, soft_wrap=True), pair, prompt, comparison)
    return 0 if comparison.equal else FAILED_CHECK


def _held_out_prompt(pair: Pair, index: int | None) -> str:
    prompts = read_prompts(pair.folder / PROMPTS)
    if index is None:
        index = TYPICAL % len(prompts)
    if not 0 <= index < len(prompts):
        raise ValueError(f"--index must be in [0, {len(prompts) - 1}] for {pair.name}, got {index}.")
    return prompts[index]["text"]


def compare(pair: Pair, prompt: str, max_new_tokens: int, repeats: int) -> Comparison:
    """Generate greedily, plain and assisted in turn, after one run of each that is not timed.

    Args:
        pair (`Pair`): Target, tokenizer and drafter.
        prompt (`str`): Text to continue.
        max_new_tokens (`int`): Tokens to generate.
        repeats (`int`): Timed runs of each.
    """
    inputs = pair.tokenizer(prompt, return_tensors="pt")
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    plain_seconds, assisted_seconds = [], []
    for _ in range(repeats + 1):
        plain, elapsed = generate_timed(pair.target, inputs, **arguments)
        plain_seconds.append(elapsed)
        assisted, elapsed = generate_timed(pair.target, inputs, assistant_model=pair.drafter, **arguments)
        assisted_seconds.append(elapsed)
    return Comparison(
        plain=plain[0],
        assisted=assisted[0],
        plain_seconds=statistics.median(plain_seconds[1:]),
        assisted_seconds=statistics.median(assisted_seconds[1:]),
        acceptance_lengths=pair.drafter.stats.rows[0],
    )


def show(console: Console, pair: Pair, prompt: str, comparison: Comparison) -> None:
    """Print prompt, both outputs, the picture of rounds and the figures.

    Args:
        console (`Console`): Where to print; without colours rounds are marked with `|`.
        pair (`Pair`): The pair that generated.
        prompt (`str`): The prompt.
        comparison (`Comparison`): What was generated.
    """
    colour = shows_colour(console)
    assisted = comparison.assisted.tolist()
    token_origins = origins(len(assisted), comparison.acceptance_lengths)
    sections = {
        f"prompt ({pair.name})": prompt,
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
    console.print(f"outputs: {verdict} ({len(assisted)} tokens, greedy, fp32, {torch.get_num_threads()} threads)")


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
