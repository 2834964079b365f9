"""One prompt, generated plainly and with the drafter, and how both are shown; the outputs must be equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.rule import Rule

from hf_domino._common.verdict import WAY_OUT, verdict
from hf_domino.cli.streaming import COLOUR_LEGEND, PLAIN_LEGEND, RoundPrinter, shows_colour
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.pair import Pair

Prompt = dict[str, Any]
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Comparison(NamedTuple):
    """The same prompt generated twice: new token ids, seconds, and tokens of each round."""

    plain: torch.Tensor
    assisted: torch.Tensor
    plain_seconds: float
    assisted_seconds: float
    acceptance_lengths: list[int]

    @property
    def speed_up(self) -> float:
        """Divide the tokens a second by plain generation's."""
        return len(self.assisted) / self.assisted_seconds / (len(self.plain) / self.plain_seconds)

    @property
    def equal(self) -> bool:
        """Compare both outputs, token for token."""
        return torch.equal(self.plain, self.assisted)


def compare(pair: Pair, prompt: Prompt, arguments: dict[str, Any], seed: int, console: Console) -> Comparison:
    """Print the prompt, generate plain and assisted as one reads along, then both again, timed.

    `arguments` are `generate`'s, and `seed` is that of every run; without colours rounds are marked with `|`.
    """
    inputs = encode(pair.tokenizer, [prompt]).to(pair.target.device)
    legend = COLOUR_LEGEND if shows_colour(console) else PLAIN_LEGEND
    # Copies are the drafter's, too: plain `generate` would take the number for prompt lookup of its own.
    alone = arguments | {"prompt_lookup_num_tokens": None}
    arms = {"plain generate": alone, f"with the drafter: {legend}": arguments | {"assistant_model": pair.drafter}}
    text = prompt.get("text") or "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt["messages"])
    _print_under(console, f"prompt ({pair.name})", text)
    seconds, outputs = [], []
    for is_timed in (False, True):
        for title, arm in arms.items():
            streamer = None
            if not is_timed:  # as it is written, which also warms up
                _print_under(console, title)
                streamer = RoundPrinter(pair.tokenizer, console, shows_rounds="assistant_model" in arm)
            torch.manual_seed(seed)
            output, elapsed = generate_timed(pair.target, inputs, streamer=streamer, **arm)
            outputs.append(output[0])
            seconds.append(elapsed)
    return Comparison(outputs[-2], outputs[-1], seconds[-2], seconds[-1], pair.drafter.stats.rows[0])


def _print_under(console: Console, title: str, *text: str) -> None:
    console.print(Rule(title, align="left", style="dim"), *text, markup=False)


def show(console: Console, pair: Pair, comparison: Comparison) -> None:
    """Print the figures, whether outputs are equal, why drafting paused, and what came of it."""
    console.print(Rule(style="dim"))
    plain, forwards = len(comparison.plain) / comparison.plain_seconds, len(comparison.acceptance_lengths) + 1
    console.print(
        f"plain: {plain:.0f} tokens/s, {len(comparison.plain)} forwards of the target; with the drafter: "
        f"{plain * comparison.speed_up:.0f} tokens/s, {forwards} forwards, the prompt's included"
    )
    outcome = "identical, token for token" if comparison.equal else "DIFFERENT"
    rounds, tokens = len(comparison.acceptance_lengths), len(comparison.assisted)
    device, dtype = pair.target.device, pair.target.dtype
    computes = f"threads: {torch.get_num_threads()}" if device.type == "cpu" else str(device)
    console.print(f"{rounds} rounds; outputs: {outcome} ({tokens} tokens, {SHORT_NAMES[dtype]}, {computes})")
    if pauses := pair.drafter.stats.pauses:
        console.print(f"drafting paused for {pair.drafter.stats.num_paused} tokens: {pauses[0].reason}")
    # A CPU without units for bfloat16 takes longer in it.
    way_out = WAY_OUT if dtype == torch.float32 else f"try --dtype float32, {WAY_OUT}"
    console.print(verdict(comparison.speed_up, "the drafter", way_out=way_out))
