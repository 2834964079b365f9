"""`hf-domino explain`: compare one answer with plain generation, and write a page that shows who wrote each token."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_domino.cli.flags import add_choice, add_models, add_prompt, prompt_of

if TYPE_CHECKING:
    from hf_domino.cli.answers import Comparison
    from hf_domino.evaluation.trace import Trace
    from hf_domino.pair import Pair

TEMPLATE = Path(__file__).with_name("explain.html.jinja")
EXAMPLES = """\
  hf-domino explain --html page.html
  hf-domino explain --target Qwen/Qwen3-8B --drafter Huang2020/Qwen3-8B-Domino-b16 "Why is the sky blue?"
"""
PHASE_TITLES = {
    "draft": "draft: the drafter's forward",
    "correction": "draft: correction of its logits",
    "target_forward": "verify: the target's forward",
    "verify": "verify: choosing and committing tokens",
    "rest": "everything else",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino explain`."""
    add_prompt(parser)
    page_help = "the page to write, in a folder that is made if needed"
    parser.add_argument("--html", metavar="FILE", type=Path, default=Path("explain.html"), help=page_help)
    add_choice(parser.add_argument_group("choice of tokens"), max_new_tokens=256)
    add_models(parser.add_argument_group("models"))


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino explain`."""
    text = prompt_of(options)
    from rich.console import Console

    from hf_domino._common.atomic_writes import check_writable, write_atomic
    from hf_domino._common.errors import invalid_argument
    from hf_domino.cli.answers import about, asked, compare, open_pair, show, text_of
    from hf_domino.evaluation.benchmark.prompts import inputs_of
    from hf_domino.evaluation.trace import trace

    file = options.html.absolute()
    if file.is_dir():
        raise invalid_argument("--html", "a file", str(options.html), "Name one in it, such as page.html.")
    check_writable(file.parent, "the folder of --html")
    pair, arguments = open_pair(options)
    prompt = asked(pair, text)
    console = Console(highlight=False, soft_wrap=True)
    seed = options.seed or 0
    comparison = compare(pair, prompt, arguments, seed, console)
    show(console, pair, comparison)
    print(f"drafting again to trace the rounds, {about(comparison.assisted_seconds)}", file=sys.stderr)
    traced = trace(pair, inputs_of(pair, [prompt]), arguments, seed)
    write_atomic(file, page(pair, text_of(prompt), traced, comparison))
    print(f"page: {file} (open it in a browser)", file=sys.stderr)


def page(pair: Pair, prompt: str, traced: Trace, comparison: Comparison) -> str:
    """Return the page as HTML, which needs no other file and no network.

    Args:
        pair ([`Pair`]): The pair that generated.
        prompt (`str`): The prompt.
        traced ([`Trace`]): The traced call.
        comparison ([`Comparison`]): The speeds with and without the drafter.
    """
    from jinja2 import Environment

    from hf_domino.evaluation.trace import DRAFTER, LOOKUP, RECYCLING, TARGET

    method = pair.drafter.config.title
    titles = {
        DRAFTER: f"{method} drafter, accepted",
        RECYCLING: "token recycling, accepted",
        LOOKUP: "prompt lookup, accepted",
        TARGET: "the target itself",
    }
    counts = {writer: traced.count(writer) for writer in titles}
    plain_speed = len(comparison.plain) / comparison.plain_seconds
    phases = traced.stats.phases or {}
    values = {
        "pair": pair.name,
        "drafter": pair.drafter_name,
        "prompt": prompt,
        "rounds": _shown_rounds(pair.tokenizer, traced),
        "writers": [(name, titles[name], count) for name, count in counts.items() if count or name == TARGET],
        "num_tokens": sum(counts.values()),
        "rates": traced.stats.acceptance_rate_at,
        "speeds": [("plain", plain_speed), ("with the drafter", plain_speed * comparison.speed_up)],
        "speed_up": comparison.speed_up,
        "equal": comparison.equal,
        "phases": [(PHASE_TITLES[name], 1000 * seconds) for name, seconds in phases.items()],
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(values)


def _shown_rounds(tokenizer: Any, traced: Trace) -> list[dict[str, Any]]:
    """Return the rounds with the texts of their tokens, as the template reads them."""
    pieces = iter(pieces_of(tokenizer, [token for each in traced.rounds for token in each.tokens]))
    shown = []
    for each in traced.rounds:
        texts = [next(pieces) for _ in each.tokens]
        shown.append(
            {
                "proposer": each.proposer,
                "tokens": list(zip(texts, each.writers, strict=True)),
                "num_proposed": each.num_proposed,
                "num_accepted": each.num_accepted,
                "left_over": [visible(tokenizer.decode([token])) for token in each.left_over],
                "emitted": [visible(text) for text in texts],
            }
        )
    return shown


def pieces_of(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; a character of several tokens belongs to the last of them."""
    from hf_domino.cli.answers import TextPieces

    decoded = TextPieces(tokenizer)
    pieces = [decoded.add(token) for token in tokens]
    if pieces:
        pieces[-1] += decoded.rest()
    return pieces


def visible(text: str) -> str:
    """Return the text of a token with marks for spaces, tabs and line ends."""
    return text.replace("\n", "\u23ce").replace("\t", "\u21e5").replace(" ", "\u00b7")
