"""Generate from one prompt with and without the drafter, and show both outputs, which must be equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.rule import Rule

from hf_domino._common.verdict import STOP, WAY_OUT, load_per_core, verdict, why_busy
from hf_domino.cli.streaming import COLOUR_LEGEND, PLAIN_LEGEND, RoundPrinter, shows_colour
from hf_domino.evaluation.benchmark.prompts import inputs_of
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.pair import Pair

Prompt = dict[str, Any]
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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


def compare(pair: Pair, prompt: Prompt, arguments: dict[str, Any], seed: int, console: Console) -> Comparison:
    """Print the prompt, stream the plain and the assisted output, and then generate both again to time them.

    Every run gets the same `arguments` of `generate` and the same `seed`. Without colours, a `|` ends each round.
    """
    inputs = inputs_of(pair, [prompt])
    legend = COLOUR_LEGEND if shows_colour(console) else PLAIN_LEGEND
    # With this number, plain `generate` would use its own prompt lookup; here it is meant for the drafter.
    alone = arguments | {"prompt_lookup_num_tokens": None}
    arms = {"plain generate": alone, f"with the drafter: {legend}": arguments | {"assistant_model": pair.drafter}}
    text = prompt.get("text") or "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt["messages"])
    _print_under(console, f"prompt ({pair.name})", text)
    for is_timed in (False, True):
        runs = []
        for title, arm in arms.items():
            streamer = None
            if not is_timed:  # the streamed run also warms up
                _print_under(console, title)
                streamer = RoundPrinter(pair.tokenizer, console, shows_rounds="assistant_model" in arm)
            torch.manual_seed(seed)
            runs.append(generate_timed(pair.target, inputs, streamer=streamer, **arm))
    (plain, plain_seconds), (assisted, assisted_seconds) = runs
    lengths = pair.drafter.stats.rows[0]
    return Comparison(plain[0], assisted[0], plain_seconds, assisted_seconds, lengths, pair.target.dtype)


def _print_under(console: Console, title: str, *text: str) -> None:
    console.print(Rule(title, align="left", style="dim"), *text, markup=False)


def show(console: Console, pair: Pair, comparison: Comparison) -> None:
    """Print the speeds, whether the outputs are equal, why drafting paused, and the verdict."""
    console.print(Rule(style="dim"))
    plain = len(comparison.plain) / comparison.plain_seconds
    rounds = len(comparison.acceptance_lengths)
    console.print(
        f"plain: {plain:.0f} tokens/s, {len(comparison.plain)} forwards of the target; with the drafter: "
        f"{plain * comparison.speed_up:.0f} tokens/s, {rounds + 1} forwards, the prompt's included"
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
    way_out = WAY_OUT
    if "training" in pair.drafter.config.lacks:
        way_out = STOP
    if not comparison.is_exact:  # a CPU without bfloat16 units is slower in bfloat16
        way_out = f"try --dtype float32, {way_out}"
    console.print(verdict(comparison.speed_up, "the drafter", "", way_out, busy, rounds + 1))
